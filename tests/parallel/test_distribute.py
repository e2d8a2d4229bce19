"""What travels to the other ranks; the travelling itself is covered by the trainer's runs on four ranks."""

import pickle

import pytest
import torch
import trainer_rows

from parallel.distribute import _check_plan, _compact


def test_a_slice_travels_without_the_tensor_it_was_cut_from():
    row = trainer_rows.row(trainer_rows.make_samples()[:2], "token", poison=False)
    large = torch.zeros(1_000_000, dtype=torch.int64)
    large[: row.num_tokens] = row.token_ids
    sliced = trainer_rows.dataclasses.replace(row, token_ids=large[: row.num_tokens])
    sent = pickle.dumps(_compact(sliced))
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent).token_ids, row.token_ids)


@pytest.mark.parametrize("lengths", [[2, 2], [1, 2, 1], [0, 0, 0]])
def test_a_plan_that_would_hang_the_ranks_is_refused(lengths):
    row = trainer_rows.row(trainer_rows.make_samples()[:1], "token")
    with pytest.raises(ValueError, match="3 lists of one and the same length"):
        _check_plan([[row] * length for length in lengths], num_data_ranks=3)
