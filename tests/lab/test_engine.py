"""Generation with a cache is the full forward, for every preset and whatever else is in the batch."""

import itertools

import pytest
import torch

import temper
from temper_lab.engine import KVCache, Sampling, generate, stream
from temper_lab.model import GPT, ModelConfig

VOCAB, CONTEXT = 61, 24


def shaken(preset: str = "residual", seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(ModelConfig(depth=2, vocab_size=VOCAB, context=CONTEXT, head_dim=32, preset=preset, num_streams=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def model() -> GPT:
    return shaken()


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def by_full_forward(model: GPT, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    return ids[len(prompt) :]


@pytest.mark.parametrize("preset", sorted(temper.PRESETS))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_cached_logits_are_the_full_forward(preset, dtype, tolerance):
    model = shaken(preset).to(dtype)
    ids = torch.tensor(prompts_of(20, 20, 20))
    with torch.no_grad():
        full = model(ids)
        cache = KVCache.for_model(model, 3)
        # A prompt, a chunk, then token by token.
        cuts = [0, 9, 14, *range(15, 21)]
        parts = [model(ids[:, start:end], cache) for start, end in itertools.pairwise(cuts)]
    assert cache.lengths == [20, 20, 20]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=tolerance * full.abs().max().item())


def test_ragged_rows_see_only_themselves(model):
    rows = prompts_of(3, 11, 7)
    full = [model(torch.tensor([row]))[0] for row in rows]
    cache = KVCache.for_model(model, 3)
    # The first two tokens of each, padded with what must not matter, then the rest one by one.
    starts = [2, 8, 5]
    padded = torch.full((3, 8), 13)
    for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
        padded[place, :start] = torch.tensor(row[:start])
    with torch.no_grad():
        model(padded, cache)
        cache.truncate(starts)
        logits = model(torch.tensor([[row[start]] for row, start in zip(rows, starts, strict=True)]), cache)
        for place, start in enumerate(starts):
            torch.testing.assert_close(logits[place, 0], full[place][start], rtol=0, atol=2e-5)
        cache.keep([1, 2])
        logits = model(torch.tensor([rows[1][9:11], [rows[2][6], 0]]), cache)
    torch.testing.assert_close(logits[0], full[1][9:11], rtol=0, atol=2e-5)
    torch.testing.assert_close(logits[1, 0], full[2][6], rtol=0, atol=2e-5)


@pytest.mark.parametrize("preset", ["residual", "temper-tucker"])
def test_greedy_batches_equal_the_full_forward(preset):
    model = shaken(preset)
    prompts = prompts_of(1, 9, 4, 15)
    together = generate(model, prompts, max_new_tokens=8, temperature=0)
    assert together == [generate(model, [prompt], max_new_tokens=8, temperature=0)[0] for prompt in prompts]
    assert together == [by_full_forward(model, prompt, 8) for prompt in prompts]


def test_rows_end_at_stop_on_their_own(model):
    prompts = prompts_of(2, 9, 5)
    free = generate(model, prompts, max_new_tokens=10, temperature=0)
    stop = free[1][3]
    stopped = generate(model, prompts, max_new_tokens=10, temperature=0, stop=stop)
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in free]
    assert len(stopped[1]) <= 3


def test_rows_end_at_the_context(model):
    prompts = prompts_of(CONTEXT - 1, CONTEXT - 4, 2)
    rows = generate(model, prompts, max_new_tokens=50, temperature=0)
    assert [len(row) for row in rows] == [1, 4, CONTEXT - 2]
    assert rows == [by_full_forward(model, prompt, CONTEXT - len(prompt)) for prompt in prompts]


def test_the_seed_decides(model):
    prompts = prompts_of(4, 4, 6)
    prompts[1] = prompts[0]
    first = generate(model, prompts, max_new_tokens=12, seed=1)
    assert first == generate(model, prompts, max_new_tokens=12, seed=1)
    assert first != generate(model, prompts, max_new_tokens=12, seed=2)
    # Two samples of one prompt differ, and neighbours change nothing.
    assert first[0] != first[1]
    assert first[:2] == generate(model, prompts[:2], max_new_tokens=12, seed=1)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    assert first == generate(model, prompts, max_new_tokens=12, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_stream_gives_what_generate_returns(model):
    prompts = prompts_of(3, 6)
    rows = [[], []]
    for row, token in stream(model, prompts, max_new_tokens=6, seed=4, top_k=5):
        rows[row].append(token)
    assert rows == generate(model, prompts, max_new_tokens=6, seed=4, top_k=5)
    assert all(isinstance(token, int) for row in rows for token in row)


def drawn(sampling: Sampling, logits: torch.Tensor, count: int = 20_000) -> torch.Tensor:
    """Frequencies at evenly spaced points of the cumulative distribution: exact up to 1 / count."""
    points = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ids = sampling.choose(logits.expand(count, -1), points)
    return torch.bincount(ids, minlength=logits.shape[-1]) / count


def test_sampling_follows_the_distribution():
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0)) * 2
    torch.testing.assert_close(drawn(Sampling(), logits), logits.softmax(-1), rtol=0, atol=2e-4)
    torch.testing.assert_close(drawn(Sampling(0.5), logits), (logits / 0.5).softmax(-1), rtol=0, atol=2e-4)
    assert drawn(Sampling(1e-6), logits).argmax() == logits.argmax()


def test_top_k_and_top_p_restrict_the_support():
    p = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    expected = torch.tensor([0, 0.4, 0, 0.25, 0])
    torch.testing.assert_close(drawn(Sampling(top_k=2), p.log()), expected / 0.65, rtol=0, atol=2e-4)
    # 0.4 + 0.25 has not reached 0.7, so the third stays.
    expected = torch.tensor([0, 0.4, 0, 0.25, 0.2])
    torch.testing.assert_close(drawn(Sampling(top_p=0.7), p.log()), expected / 0.85, rtol=0, atol=2e-4)
    torch.testing.assert_close(drawn(Sampling(top_k=3, top_p=1.0), p.log()), expected / 0.85, rtol=0, atol=2e-4)
    assert drawn(Sampling(top_p=1e-9), p.log())[1] == 1
    assert drawn(Sampling(top_k=1), p.log())[1] == 1
    assert drawn(Sampling(top_k=100), p.log()).count_nonzero() == 5


def test_the_ends_of_the_unit_interval():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    for point in (0.0, 1 - 2**-53, 1.0):
        assert Sampling().choose(logits, torch.tensor([point], dtype=torch.float64)).item() in (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[]]}, "prompt 0 has 0 tokens"),
        ({"prompts": [[1], [0] * CONTEXT]}, f"prompt 1 has {CONTEXT} tokens"),
        ({"prompts": [[VOCAB]]}, f"id {VOCAB}"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_bad_requests(model, changes, message):
    arguments = {"prompts": [[1, 2]], "max_new_tokens": 3, **changes}
    with pytest.raises(ValueError, match=message):
        stream(model, **arguments)


def test_nothing_to_do(model):
    assert generate(model, [], max_new_tokens=3) == []
    assert generate(model, [[1], [2]], max_new_tokens=0) == [[], []]


def test_a_full_cache_says_so(model):
    cache = KVCache.for_model(model, 1, capacity=4)
    model(torch.tensor([[1, 2, 3]]), cache)
    with pytest.raises(ValueError, match="this cache holds 4"):
        model(torch.tensor([[1, 2]]), cache)
    assert cache.lengths == [3]
    with pytest.raises(ValueError, match="capacity is 25"):
        KVCache.for_model(model, 1, capacity=CONTEXT + 1)
    with pytest.raises(ValueError, match="none above"):
        cache.truncate([4])
