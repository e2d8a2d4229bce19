"""Vocab-parallel log-probs, entropy and top tokens against softmax in fp64 over the whole vocabulary."""

import itertools
import math

import pytest
import torch
from model_launch import launch

VOCAB_SIZE, PADDED = 45, 56  # on 4 ranks of 14: the last one holds 3 tokens and 11 entries of padding
SEGMENTS = (6, 1, 9, 4)
NUM_TOKENS = sum(SEGMENTS)
CASES = list(itertools.product(("one_rank", "four_ranks"), (1.0, 0.5), (False, True), (False, True)))
CANDIDATES = {
    "candidates_one_rank": (1, 5, None),
    "candidates_four_ranks": (4, 5, None),
    "candidates_more_than_a_rank_has": (4, 20, 40),
}
"""Job -> number of ranks, k, and the bound below which ids are candidates."""


def make_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((NUM_TOKENS, PADDED), generator=generator)
    logits[:, VOCAB_SIZE:] = 1e4  # padding would win every softmax
    mask = torch.rand(NUM_TOKENS, generator=generator) < 0.5
    mask[1] = False
    logits[0] = math.nan  # only token 1 is predicted from it, and that one is masked in the masked cases
    token_ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    token_ids[-1] = VOCAB_SIZE - 1  # on the last rank
    logprob_weights, entropy_weights = torch.randn((2, NUM_TOKENS), generator=generator)
    logprob_weights[1] = entropy_weights[1] = 0.0
    cu_seqlens = torch.tensor([0, *SEGMENTS]).cumsum(0).to(torch.int32)
    teacher_logits = 3 * torch.randn((NUM_TOKENS, PADDED), generator=generator)
    teacher_logits[:, VOCAB_SIZE:] = 1e4
    teacher_logits[0] = math.nan
    starts = cu_seqlens[:-1].long()
    num_asked = int(mask.sum() - mask[starts].sum())
    return {
        "teacher_logits": teacher_logits, "candidate_weights": torch.randn((num_asked, 20), generator=generator),
        "logits": logits, "token_ids": token_ids, "cu_seqlens": cu_seqlens, "mask": mask,
        "logprob_weights": logprob_weights, "entropy_weights": entropy_weights,
    }  # fmt: skip


def case_name(ranks: str, temperature: float, masked: bool, entropy: bool) -> str:
    return f"{ranks}-{temperature}-{masked}-{entropy}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logprobs")
    inputs = make_inputs()
    torch.save(inputs, folder / "masked.pt")
    inputs["logits"] = torch.where(inputs["logits"].isnan(), 0.0, inputs["logits"])
    torch.save(inputs, folder / "all.pt")
    torch.save(inputs | {"logits": inputs["logits"].bfloat16()}, folder / "bf16.pt")
    base = {"kind": "logprobs", "vocab_size": VOCAB_SIZE, "chunk_elements": 60}  # chunks of one to four rows
    jobs: dict[int, list[dict]] = {1: [], 4: []}
    for ranks, temperature, masked, entropy in CASES:
        job = base | {"name": case_name(ranks, temperature, masked, entropy), "temperature": temperature}
        job |= {"masked": masked, "entropy": entropy, "inputs": str(folder / ("masked.pt" if masked else "all.pt"))}
        jobs[1 if ranks == "one_rank" else 4].append(job)
    bf16 = {"name": "bf16", "temperature": 1.0, "masked": False, "entropy": True, "inputs": str(folder / "bf16.pt")}
    jobs[4].append(base | bf16)
    for name, (ranks, k, ids_below) in CANDIDATES.items():
        own = {"name": name, "kind": "candidates", "temperature": 0.5, "inputs": str(folder / "masked.pt")}
        jobs[ranks].append(base | own | {"k": k, "ids_below": ids_below})
    launch(jobs, folder)
    return folder


def reference(inputs: dict[str, torch.Tensor], *, temperature: float, masked: bool, entropy: bool):
    """Log-probs, entropy and the gradient for the logits, in fp64, token by token."""
    logits = torch.where(inputs["logits"].isnan(), 0.0, inputs["logits"]).double().requires_grad_()
    starts = set(inputs["cu_seqlens"][:-1].tolist())
    logprobs, entropies = torch.zeros((2, NUM_TOKENS), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for t in range(NUM_TOKENS):
        if t in starts or (masked and not inputs["mask"][t]):
            continue
        log_p = (logits[t - 1, :VOCAB_SIZE] / temperature).log_softmax(-1)
        logprob, h = log_p[inputs["token_ids"][t]], -(log_p.exp() * log_p).sum()
        logprobs[t], entropies[t] = logprob.detach(), h.detach()
        total = total + inputs["logprob_weights"][t] * logprob + entropy * inputs["entropy_weights"][t] * h
    total.backward()
    return logprobs, entropies, logits.grad


@pytest.mark.parametrize(("ranks", "temperature", "masked", "entropy"), CASES)
def test_equals_softmax_over_the_whole_vocabulary(runs, ranks, temperature, masked, entropy):
    got = torch.load(runs / f"{case_name(ranks, temperature, masked, entropy)}.pt")
    want = reference(make_inputs(), temperature=temperature, masked=masked, entropy=entropy)
    for key, value in zip(("logprobs", "entropy", "gradient"), want, strict=True):
        torch.testing.assert_close(got[key].double(), value, rtol=1e-5, atol=2e-6)
        assert got[key].dtype == torch.float32
    assert (got["gradient"][:, VOCAB_SIZE:] == 0).all()


def test_bf16_logits_are_summed_in_fp32(runs):
    got = torch.load(runs / "bf16.pt")
    inputs = make_inputs()
    inputs["logits"] = inputs["logits"].bfloat16()
    logprobs, entropy, gradient = reference(inputs, temperature=1.0, masked=False, entropy=True)
    torch.testing.assert_close(got["logprobs"].double(), logprobs, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got["entropy"].double(), entropy, rtol=1e-5, atol=2e-6)
    assert got["gradient"].dtype == torch.bfloat16
    torch.testing.assert_close(got["gradient"].double(), gradient, rtol=2**-8, atol=1e-6)


def test_shift_by_hand(runs):
    """Of the first segment, token 2 is predicted from row 1, and the first token of a segment by nothing."""
    inputs = make_inputs()
    got = torch.load(runs / f"{case_name('one_rank', 1.0, False, True)}.pt")
    row = inputs["logits"][1, :VOCAB_SIZE].tolist()
    by_hand = row[int(inputs["token_ids"][2])] - math.log(sum(math.exp(z) for z in row))
    assert got["logprobs"][2].item() == pytest.approx(by_hand, rel=1e-5)
    assert [got["logprobs"][start].item() for start in (0, 6, 7, 16)] == [0.0] * 4
    assert (got["gradient"][[5, 6, 15, 19]] == 0).all()  # the last rows of the segments predict nothing


@pytest.mark.parametrize("name", CANDIDATES)
def test_top_tokens_and_their_logprobs(runs, name):
    """The teacher's likeliest ids and log-probs, the student's log-probs of them, the gradient of all terms together;
    padding and NaN where nothing is asked for stay out."""
    _, k, ids_below = CANDIDATES[name]
    got, inputs = torch.load(runs / f"{name}.pt"), make_inputs()
    starts = set(inputs["cu_seqlens"][:-1].tolist())
    asked = [t for t in range(NUM_TOKENS) if inputs["mask"][t] and t not in starts]
    before = torch.tensor(asked) - 1
    teacher = (inputs["teacher_logits"][before, :VOCAB_SIZE].double() / 0.5).log_softmax(-1)
    top = teacher[:, :ids_below].topk(k)
    assert torch.equal(got["ids"].long(), top.indices)
    assert got["ids"].dtype == torch.int32
    torch.testing.assert_close(got["teacher_logprobs"].double(), top.values, rtol=1e-5, atol=2e-6)

    logits = torch.where(inputs["logits"].isnan(), 0.0, inputs["logits"]).double().requires_grad_()
    log_p = (logits[before, :VOCAB_SIZE] / 0.5).log_softmax(-1)
    of_candidates = log_p.gather(1, top.indices)
    of_tokens = log_p.gather(1, inputs["token_ids"][asked, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(got["candidate_logprobs"].double(), of_candidates.detach(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got["logprobs"][asked].double(), of_tokens.detach(), rtol=1e-5, atol=2e-6)
    total = (inputs["logprob_weights"][asked] * of_tokens).sum() + (inputs["entropy_weights"][asked] * entropy).sum()
    (total + (inputs["candidate_weights"][:, :k] * of_candidates).sum()).backward()
    torch.testing.assert_close(got["gradient"].double(), logits.grad, rtol=1e-5, atol=5e-6)
