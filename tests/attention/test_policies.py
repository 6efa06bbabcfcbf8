"""Each policy against its reference: the same tokens and outputs, whatever the shape, and never a NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention import reference
from tests.attention.reference import FIXED, READING, Head

from tiercel.attention.higgs import Higgs
from tiercel.attention.numbers import as_bias, attend, attention_weights
from tiercel.attention.policy import LayerContext, Policy, Prefill, Prepared, budget_tokens
from tiercel.attention.registry import POLICIES, policies_named, policy_named
from tiercel.attention.running import seen_by
from tiercel.attention.stored import Stored
from tiercel.codecs.names import LOSSY
from tiercel.errors import ConfigError

DIM = 8
NEW = 3
SELECTIVE = [name for name in POLICIES if name not in LOSSY]


@dataclass(frozen=True)
class Case:
    """Random KV of several rows, padded on the left with numbers that must never matter."""

    lengths: tuple[int, ...]
    kv_heads: int
    group: int
    seed: int

    @property
    def tokens(self) -> int:
        return max(self.lengths)

    def tensors(self) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(self.seed)
        batch, n, heads = len(self.lengths), self.tokens, self.kv_heads

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float32) * 2

        real = torch.tensor([[at >= n - length for at in range(n)] for length in self.lengths])
        found = {
            "keys": normal(batch, heads, n, DIM),
            "values": normal(batch, heads, n, DIM),
            "prompt": normal(batch, heads, self.group, n, DIM),
            "queries": normal(batch, heads, self.group, NEW, DIM),
            "new_keys": normal(batch, heads, NEW, DIM),
            "new_values": normal(batch, heads, NEW, DIM),
            "real": real,
            "special": (torch.rand(batch, n, generator=random) < 0.05) & real,
            "punctuation": (torch.rand(batch, n, generator=random) < 0.2) & real,
        }
        padding = ~real[:, None, :, None]
        for name in ("keys", "values"):
            found[name] = found[name].masked_fill(padding, 1e4)
        return found


def rotate(keys: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Not a rotation, but seen in the keys."""
    return keys + delta[..., None, None]


def named(name: str) -> Policy:
    return Stored(LOSSY[name], block_tokens=16) if name in LOSSY else policy_named(name)


def prepare(name: str, case: Case, given: dict[str, torch.Tensor], budget: torch.Tensor) -> Prepared:
    policy, real = named(name), given["real"]
    observer = policy.observer(Prefill(real, case.kv_heads, budget))
    if observer is not None:
        n = case.tokens
        causal = torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None, :]
        causal |= torch.eye(n, dtype=torch.bool)
        bias = as_bias(causal)[:, :, None]
        weights = attention_weights(given["prompt"], given["keys"], bias, DIM**-0.5)
        weights = weights * real[:, None, None, :, None]
        for first in range(0, n, 7):  # some queries at a time, as a prefill shows them
            end = min(first + 7, n)
            observer.see(weights[:, :, :, first:end, :end].contiguous(), first)
    context = LayerContext(
        0, given["keys"], given["values"], real, given["special"], given["punctuation"], rotate
    )
    return policy.prepare(context, budget, observer)


def head_of(case: Case, given: dict[str, torch.Tensor], row: int, head: int, budget: int) -> Head:
    begin = case.tokens - case.lengths[row]

    def flags(name: str) -> set[int]:
        return {int(j) - begin for j in given[name][row].nonzero()}

    keys = given["keys"][row, head, begin:]
    return Head(
        keys.double().numpy(),
        given["values"][row, head, begin:].double().numpy(),
        given["prompt"][row, head, :, begin:].double().numpy(),
        budget,
        Higgs(4).roundtrip(keys).double().numpy(),
        flags("special"),
        flags("punctuation"),
    )


def compare(name: str, case: Case, budgets: list[int]) -> None:
    """Selected sets and outputs of `name` with a budget per row, against the reference."""
    given = case.tensors()
    budget = torch.tensor(budgets)[:, None].expand(-1, case.kv_heads).contiguous()
    untouched = {key: value.clone() for key, value in given.items()}
    prepared = prepare(name, case, given, budget)
    keys = torch.cat([prepared.keys, given["new_keys"]], 2)
    values = torch.cat([prepared.values, given["new_values"]], 2)
    allowed = seen_by(prepared, given["real"], given["queries"], 0, keys.shape)
    weights = attention_weights(given["queries"], keys, as_bias(allowed)[:, :, None], DIM**-0.5)
    outputs = attend(weights, values)
    assert torch.isfinite(outputs).all()
    for key, value in untouched.items():
        assert torch.equal(given[key], value), f"{name} changed {key}"
    for row in range(len(case.lengths)):
        for head in range(case.kv_heads):
            check_head(name, case, given, prepared, (row, head), budgets[row], allowed, outputs)


def check_head(
    name: str, case: Case, given: dict[str, torch.Tensor], prepared: Prepared, at: tuple[int, int],
    budget: int, allowed: torch.Tensor, outputs: torch.Tensor,
) -> None:  # fmt: skip
    row, head = at
    begin, n = case.tokens - case.lengths[row], case.lengths[row]
    told = head_of(case, given, row, head, budget)
    keys = np.concatenate([prepared.keys[row, head, begin:].double(), given["new_keys"][row, head].double()])
    values = np.concatenate(
        [prepared.values[row, head, begin:].double(), given["new_values"][row, head].double()]
    )
    queries = given["queries"][row, head].double().numpy()
    for new in range(NEW):
        wanted = READING[name](told, queries[:, new]) if name in READING else FIXED[name](told)
        found = {int(j) - begin for j in allowed[row, head, new, : case.tokens].nonzero()}
        assert found == wanted, f"{name}: row {row}, head {head}, query {new}"
        if name not in ("full", "fastgen"):
            assert len(found) == budget
        seen = wanted | set(range(n, n + new + 1))
        for one in range(case.group):
            right = reference.output(queries[one, new], keys, values, seen)
            got = outputs[row, new, head * case.group + one].double().numpy()
            assert np.allclose(got, right, atol=1e-4), f"{name}: output of row {row}, head {head}"


@pytest.mark.parametrize("name", SELECTIVE)
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 3)], ids=["MHA", "GQA"])
def test_selects_and_answers_as_its_reference(name: str, kv_heads: int, group: int) -> None:
    case = Case((75, 40, 23), kv_heads, group, 1)
    for budget in ([1, 1, 1], [74, 39, 22], [75, 40, 23], [20, 11, 6]):
        compare(name, case, budget)


@pytest.mark.parametrize("name", SELECTIVE)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_contexts_of_a_few_tokens(name: str, n: int) -> None:
    for budget in range(1, n + 1):
        compare(name, Case((n,), 1, 2, n), [budget])


@settings(max_examples=40)
@given(
    name=st.sampled_from(SELECTIVE),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shares=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_any_shape_any_budget(
    name: str, lengths: list[int], shares: list[float], kv_heads: int, group: int, seed: int
) -> None:
    budgets = [max(1, round(n * share)) for n, share in zip(lengths, shares, strict=False)]
    compare(name, Case(tuple(lengths), kv_heads, group, seed), budgets)


@pytest.mark.parametrize("name", [*SELECTIVE, *LOSSY])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 100.0], ids=["zeros", "tiny", "large"])
def test_odd_numbers_give_no_nan(name: str, scale: float) -> None:
    case = Case((20, 9), 1, 2, 3)
    given = {k: v * scale if v.is_floating_point() else v for k, v in case.tensors().items()}
    prepared = prepare(name, case, given, torch.tensor([[5], [2]]))
    allowed = seen_by(prepared, given["real"], given["queries"], 0, (2, 1, 20 + NEW, DIM))
    keys = torch.cat([prepared.keys, given["new_keys"]], 2)
    weights = attention_weights(given["queries"], keys, as_bias(allowed)[:, :, None], DIM**-0.5)
    values = torch.cat([prepared.values, given["new_values"]], 2)
    assert torch.isfinite(attend(weights, values)).all()


@pytest.mark.parametrize("name", LOSSY)
def test_stored_blocks_come_back_nearly_the_same_and_the_rest_exactly(name: str) -> None:
    case = Case((69, 37), 2, 2, 4)
    given = case.tensors()
    prepared = prepare(name, case, given, torch.full((2, 2), 69))
    coded = given["real"].clone()
    coded[:, 64:] = False  # four blocks and two; 5 tokens are left over
    coded = coded[:, None, :, None].expand_as(given["keys"])
    for got, exact in ((prepared.keys, given["keys"]), (prepared.values, given["values"])):
        error = (got - exact)[coded].norm() / exact[coded].norm()
        assert 0 < error < 0.15
        assert torch.equal(got[~coded], exact[~coded])
    assert prepared.bytes.host < 0.6 * prepared.bytes.device


def test_sinks_are_moved_next_to_the_window_and_nothing_else_is() -> None:
    given = Case((30,), 1, 1, 5).tensors()
    prepared = prepare("streaming-rerotated", Case((30,), 1, 1, 5), given, torch.tensor([[10]]))
    moved = prepared.keys - given["keys"]
    assert torch.allclose(moved[0, 0, :4], torch.full((4, DIM), 20.0), atol=1e-4)  # 20 of 30 are gone
    assert torch.equal(prepared.keys[0, 0, 4:], given["keys"][0, 0, 4:])


def test_landmarks_with_coded_storage_read_the_recent_tokens_exactly() -> None:
    given = Case((40,), 1, 1, 6).tensors()
    prepared = prepare("landmark-4bit", Case((40,), 1, 1, 6), given, torch.tensor([[10]]))
    for got, exact in ((prepared.keys, given["keys"]), (prepared.values, given["values"])):
        assert torch.equal(got[0, 0, 35:], exact[0, 0, 35:])
        assert not torch.equal(got[0, 0, :35], exact[0, 0, :35])


def test_bytes_are_what_the_definition_says() -> None:
    case, budget = Case((40,), 1, 1, 6), torch.tensor([[10]])
    token = 2 * DIM * 4  # keys and values in float32
    given = case.tensors()
    assert prepare("window", case, given, budget).bytes.device == 10 * token
    assert prepare("full", case, given, budget).bytes.device == 40 * token
    landmark = prepare("landmark", case, given, budget).bytes
    assert landmark.fetched == 5 * token  # half of the budget is recent and stays
    assert landmark.host == 35 * token
    assert landmark.device == 40 * (2 * DIM + 16) / 8 + 10 * token


def test_higgs_is_what_it_says() -> None:
    """Against a direct one: normalise, rotate, nearest of all points, and back."""
    from tiercel.attention.higgs import codebook

    hadamard = np.array([[1.0]])
    while len(hadamard) < DIM:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    hadamard /= np.sqrt(DIM)
    vectors = torch.randn(20, DIM, generator=torch.Generator().manual_seed(7)).double().numpy()
    for width in (2, 4):
        points = codebook(width).double().numpy()
        got = Higgs(width).roundtrip(torch.from_numpy(vectors).float()).double().numpy()
        for vector, back in zip(vectors, got, strict=True):
            length = float(np.float16(np.linalg.norm(vector)))
            turned = hadamard @ (vector / length) * np.sqrt(DIM)
            parts = [
                points[((points - turned[at : at + width]) ** 2).sum(1).argmin()]
                for at in range(0, DIM, width)
            ]
            assert np.allclose(hadamard @ np.concatenate(parts) / np.sqrt(DIM) * length, back, atol=1e-3)


@pytest.mark.parametrize(("width", "error_max"), [(2, 0.10), (4, 0.33)], ids=["4 bits", "2 bits"])
def test_higgs_errors_on_gaussians(width: int, error_max: float) -> None:
    vectors = torch.randn(2000, 64, generator=torch.Generator().manual_seed(8))
    error = float((Higgs(width).roundtrip(vectors) - vectors).norm() / vectors.norm())
    assert error_max / 2 < error < error_max


def test_dimensions_that_are_no_power_of_two() -> None:
    for dim in (6, 80, 96):
        vectors = torch.randn(50, dim, generator=torch.Generator().manual_seed(9))
        for width in (2, 4):
            back = Higgs(width).roundtrip(vectors)
            assert back.shape == vectors.shape
            assert float((back - vectors).norm() / vectors.norm()) < 0.4


def test_a_budget_is_a_share_of_each_row_and_at_least_a_token() -> None:
    real = torch.tensor([[True] * 10, [False] * 7 + [True] * 3, [False] * 9 + [True]])
    assert budget_tokens(0.25, real, 2).tolist() == [[2, 2], [1, 1], [1, 1]]
    assert budget_tokens(1.0, real, 1).tolist() == [[10], [3], [1]]


def test_unknown_policies_are_named() -> None:
    with pytest.raises(ConfigError, match="policy 'qest' is unknown; accepted: full, window"):
        policies_named(["full", "qest"])
