"""Vocab-parallel log-probs, entropy and top tokens against softmax in fp64 over the whole vocabulary."""

import itertools
import math

import pytest
import torch
from model_launch import launch

VOCAB_SIZE, PADDED = 45, 56  # on 4 ranks of 14: the last one holds 3 tokens and 11 entries of padding
NUM_ROWS = 17
ROWS = [3, 3, 0, 16, 5, 5, 5, 12, 9, 1, 8, 14, 13]
"""The row that each entry is read from: some from the same one, and rows that nothing is read from."""
UNREAD = sorted(set(range(NUM_ROWS)) - set(ROWS))
CASES = list(itertools.product(("one_rank", "four_ranks"), (1.0, 0.5), (False, True)))
CANDIDATES = {
    "candidates_one_rank": (1, 5, None),
    "candidates_four_ranks": (4, 5, None),
    "candidates_more_than_a_rank_has": (4, 20, 40),
}
"""Job -> number of ranks, k, and the bound below which ids are candidates."""


def make_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, teacher_logits = 3 * torch.randn((2, NUM_ROWS, PADDED), generator=generator)
    for values in (logits, teacher_logits):
        values[:, VOCAB_SIZE:] = 1e4  # padding would win every softmax
    logits[UNREAD[0]] = math.nan
    token_ids = torch.randint(0, VOCAB_SIZE, (len(ROWS),), generator=generator)
    token_ids[-1] = VOCAB_SIZE - 1  # on the last rank
    token_ids[5] = token_ids[4]  # two trajectories that sampled the same
    logprob_weights, entropy_weights = torch.randn((2, len(ROWS)), generator=generator)
    return {
        "logits": logits, "teacher_logits": teacher_logits, "rows": torch.tensor(ROWS), "token_ids": token_ids,
        "logprob_weights": logprob_weights, "entropy_weights": entropy_weights,
        "candidate_weights": torch.randn((NUM_ROWS, 20), generator=generator),
    }  # fmt: skip


def case_name(ranks: str, temperature: float, entropy: bool) -> str:
    return f"{ranks}-{temperature}-{entropy}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logprobs")
    inputs = make_inputs()
    torch.save(inputs, folder / "nan.pt")
    inputs["logits"] = inputs["logits"].nan_to_num()
    torch.save(inputs, folder / "finite.pt")
    torch.save(inputs | {"logits": inputs["logits"].bfloat16()}, folder / "bf16.pt")
    base = {"kind": "logprobs", "vocab_size": VOCAB_SIZE, "chunk_elements": 60}  # chunks of one to four rows
    jobs: dict[int, list[dict]] = {1: [], 4: []}
    for ranks, temperature, entropy in CASES:
        job = base | {"name": case_name(ranks, temperature, entropy), "temperature": temperature}
        job |= {"entropy": entropy, "inputs": str(folder / "nan.pt")}
        jobs[1 if ranks == "one_rank" else 4].append(job)
    bf16 = {"name": "bf16", "temperature": 1.0, "entropy": True, "inputs": str(folder / "bf16.pt")}
    jobs[4].append(base | bf16)
    for name, (ranks, k, ids_below) in CANDIDATES.items():
        own = {"name": name, "kind": "candidates", "temperature": 0.5, "inputs": str(folder / "finite.pt")}
        jobs[ranks].append(base | own | {"k": k, "ids_below": ids_below})
    launch(jobs, folder)
    return folder


def reference(inputs: dict[str, torch.Tensor], *, temperature: float, entropy: bool):
    """Log-probs, entropy and the gradient for the logits, in fp64, entry by entry."""
    logits = inputs["logits"].nan_to_num().double().requires_grad_()
    logprobs, entropies = torch.zeros((2, len(ROWS)), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for n, row in enumerate(ROWS):
        log_p = (logits[row, :VOCAB_SIZE] / temperature).log_softmax(-1)
        logprob, h = log_p[inputs["token_ids"][n]], -(log_p.exp() * log_p).sum()
        logprobs[n], entropies[n] = logprob.detach(), h.detach()
        total = total + inputs["logprob_weights"][n] * logprob + entropy * inputs["entropy_weights"][n] * h
    total.backward()
    return logprobs, entropies, logits.grad


@pytest.mark.parametrize(("ranks", "temperature", "entropy"), CASES)
def test_equals_softmax_over_the_whole_vocabulary(runs, ranks, temperature, entropy):
    got = torch.load(runs / f"{case_name(ranks, temperature, entropy)}.pt")
    want = reference(make_inputs(), temperature=temperature, entropy=entropy)
    for key, value in zip(("logprobs", "entropy", "gradient"), want, strict=True):
        torch.testing.assert_close(got[key].double(), value, rtol=1e-5, atol=2e-6)
        assert got[key].dtype == torch.float32
    assert (got["gradient"][:, VOCAB_SIZE:] == 0).all()
    assert (got["gradient"][UNREAD] == 0).all(), "also where the logits are NaN"


def test_bf16_logits_are_summed_in_fp32(runs):
    got = torch.load(runs / "bf16.pt")
    inputs = make_inputs()
    inputs["logits"] = inputs["logits"].bfloat16()
    logprobs, entropy, gradient = reference(inputs, temperature=1.0, entropy=True)
    torch.testing.assert_close(got["logprobs"].double(), logprobs, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got["entropy"].double(), entropy, rtol=1e-5, atol=2e-6)
    assert got["gradient"].dtype == torch.bfloat16
    torch.testing.assert_close(got["gradient"].double(), gradient, rtol=2**-8, atol=1e-6)


def test_one_entry_by_hand(runs):
    inputs = make_inputs()
    got = torch.load(runs / f"{case_name('one_rank', 1.0, True)}.pt")
    row = inputs["logits"][ROWS[2], :VOCAB_SIZE].tolist()
    by_hand = row[int(inputs["token_ids"][2])] - math.log(sum(math.exp(z) for z in row))
    assert got["logprobs"][2].item() == pytest.approx(by_hand, rel=1e-5)
    assert got["logprobs"][4] == got["logprobs"][5], "the same token after the same history"


@pytest.mark.parametrize("name", CANDIDATES)
def test_top_tokens_and_their_logprobs(runs, name):
    """The teacher's likeliest ids and log-probs, the student's log-probs of them, the gradient of all terms together;
    padding stays out."""
    _, k, ids_below = CANDIDATES[name]
    got, inputs = torch.load(runs / f"{name}.pt"), make_inputs()
    teacher = (inputs["teacher_logits"][:, :VOCAB_SIZE].double() / 0.5).log_softmax(-1)
    top = teacher[:, :ids_below].topk(k)
    assert torch.equal(got["ids"].long(), top.indices)
    assert got["ids"].dtype == torch.int32
    torch.testing.assert_close(got["teacher_logprobs"].double(), top.values, rtol=1e-5, atol=2e-6)

    logits = inputs["logits"].nan_to_num().double().requires_grad_()
    log_p = (logits[:, :VOCAB_SIZE] / 0.5).log_softmax(-1)
    of_candidates = log_p.gather(1, top.indices)
    of_tokens = log_p[ROWS, inputs["token_ids"]]
    entropy = -(log_p.exp() * log_p).sum(-1)[ROWS]
    torch.testing.assert_close(got["candidate_logprobs"].double(), of_candidates.detach(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got["logprobs"].double(), of_tokens.detach(), rtol=1e-5, atol=2e-6)
    total = (inputs["logprob_weights"] * of_tokens).sum() + (inputs["entropy_weights"] * entropy).sum()
    read = torch.zeros(NUM_ROWS, 1).index_fill(0, torch.tensor(ROWS), 1.0)
    (total + (read * inputs["candidate_weights"][:, :k] * of_candidates).sum()).backward()
    torch.testing.assert_close(got["gradient"].double(), logits.grad, rtol=1e-5, atol=5e-6)
