"Step cost, break-even and paired ratios: properties over random machines and runs, and published numbers with their source."
import numpy as np
import pandas as pd
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from k2eagle import paired, stepcost

few = settings(max_examples=25, deadline=None)
many = settings(max_examples=100, deadline=None)

GRID = pd.MultiIndex.from_product([(1, 2, 4, 8, 16, 32, 64), (0, 1, 3, 5)], names=["batch", "num_draft"]).to_frame(index=False)
rates = st.floats(0, 1)
machines = st.fixed_dictionaries({  # seconds, from a small dense model to a large mixture of experts
    "weights": st.floats(1e-3, 3e-2), "experts": st.floats(0, 5e-2), "requests": st.floats(0, 2e-4), "tokens": st.floats(1e-6, 3e-4),
    "draft": st.floats(0, 2e-3), "speculation": st.floats(0, 3e-3), "sharpness": st.floats(1, 16)})


def times(machine: dict, cells: pd.DataFrame) -> np.ndarray:
    "Step times by the definition, written out anew."
    tokens = cells.batch * (cells.num_draft + 1)
    read = 1 - (1 - 8 / 384) ** tokens
    memory, compute = machine["weights"] + machine["experts"] * read + machine["requests"] * cells.batch, machine["tokens"] * tokens
    power = machine["sharpness"]
    joined = memory * (1 + (compute / memory) ** power) ** (1 / power) if power < 16 else np.maximum(memory, compute)
    return (joined + machine["draft"] * cells.num_draft + machine["speculation"] * (cells.num_draft > 0)).to_numpy()


def sweep(machine: dict, spread: float = 0.0, seed: int = 0, grid: pd.DataFrame = GRID) -> pd.DataFrame:
    "Measurements of a machine, each off by a few percent."
    return grid.assign(step_s=times(machine, grid) * np.random.default_rng(seed).lognormal(0, spread, len(grid)))


def costs(machine: dict, cells: pd.DataFrame) -> np.ndarray:
    "True step costs."
    return times(machine, cells) / times(machine, cells.assign(num_draft=0))


# acceptance

@many
@given(rates, st.integers(0, 12))
def test_accept_length_lies_between_one_and_all(rate, num_draft):
    length = stepcost.accept_length(rate, num_draft)
    assert 1 <= length <= num_draft + 1 + 1e-9
    assert length == pytest.approx(stepcost.accept_length(rate ** np.arange(1, num_draft + 1), num_draft))
    if rate < 0.999:
        assert length == pytest.approx((1 - rate ** (num_draft + 1)) / (1 - rate))
    assert stepcost.accept_length(rate, num_draft + 1) >= length


@many
@given(rates, st.integers(1, 12))
def test_rate_needed_is_the_way_back(rate, num_draft):
    length = stepcost.accept_length(rate, num_draft)
    assert stepcost.accept_length(stepcost.rate_needed(min(length, num_draft + 1), num_draft), num_draft) == pytest.approx(length)


@many
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=6))
def test_acceptance_is_taken_or_refused(shares):
    fine = all(0 <= share <= 1 for share in shares) and all(a >= b for a, b in zip(shares, shares[1:]))
    if fine:
        assert 1 <= stepcost.accept_length(shares, len(shares)) <= len(shares) + 1
    elif not (all(0 <= share <= 1 for share in shares) and all(a >= b - 1e-9 for a, b in zip(shares, shares[1:]))):
        with pytest.raises(ValueError, match="expected fractions that never rise"):
            stepcost.accept_length(shares, len(shares))


@many
@given(st.floats(0.01, 20), st.floats(0.01, 20), st.integers(1, 8))
def test_implied_cost_is_taken_or_refused(length, speedup, num_draft):
    if 1 <= length <= num_draft + 1:
        assert stepcost.implied_cost(length, speedup, num_draft) * speedup == pytest.approx(length)
    else:
        with pytest.raises(ValueError, match="expected 1 to K \\+ 1 tokens a step"):
            stepcost.implied_cost(length, speedup, num_draft)


# experts

@many
@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 2000))
def test_experts_read_grows_ever_slower(experts, active, tokens):
    assume(active <= experts)
    read = stepcost.experts_read(np.arange(tokens, tokens + 3), experts, active)
    assert active - 1e-9 <= read[0] <= min(experts, active * tokens) + 1e-9
    assert read[0] <= read[1] + 1e-9 and read[2] - read[1] <= read[1] - read[0] + 1e-9


# the fit

@few
@given(machines)
def test_fit_finds_a_machine_without_errors(machine):
    machine = machine | {"sharpness": 2.0}
    model = stepcost.fit(sweep(machine), 384, 8, sharpness=2, draws=0)
    assert np.abs(model.points.error).max() < 2e-3
    others = pd.DataFrame([(3, 2), (12, 4), (48, 1)], columns=["batch", "num_draft"])  # not among the points
    assert model.costs(others.batch, others.num_draft)[0] == pytest.approx(costs(machine, others), rel=0.01)


@few
@given(machines)
def test_fit_of_any_sharpness_is_close(machine):
    model = stepcost.fit(sweep(machine), 384, 8, draws=0)
    assert np.abs(model.points.error).max() < 0.06
    assert model.costs(GRID.batch, GRID.num_draft)[0] == pytest.approx(costs(machine, GRID), rel=0.08)


@few
@given(machines, st.floats(1e-4, 1e4), st.randoms(use_true_random=False))
def test_cost_knows_no_unit_and_no_order(machine, factor, shuffled):
    points = sweep(machine, 0.02)
    order = list(range(len(points)))
    shuffled.shuffle(order)
    one, other = (stepcost.fit(some, 384, 8, sharpness=2, draws=0) for some in (points, points.iloc[order].assign(step_s=lambda own: own.step_s * factor)))
    assert other.costs(GRID.batch, GRID.num_draft)[0] == pytest.approx(one.costs(GRID.batch, GRID.num_draft)[0], rel=5e-3)


@settings(few, max_examples=12, phases=[Phase.generate])  # to shrink a failing machine would take minutes
@given(machines, st.integers(0, 1000))
def test_held_out_errors_stay_below_a_tenth(machine, seed):
    held = stepcost.leave_out(sweep(machine, 0.02, seed), "batch", 384, 8)
    within = held[~held.beyond]
    assert within.error.abs().mean() < 0.05 and within.cost_error.abs().mean() < 0.05
    assert within.error.abs().quantile(0.95) < 0.10


@few
@given(machines, rates, st.integers(1, 5))
def test_speedup_is_length_over_cost(machine, rate, num_draft):
    model = stepcost.fit(sweep(machine, 0.01), 384, 8, sharpness=2, draws=0)
    gains, needed = stepcost.speedups(model, rate, num_drafts=[num_draft]), stepcost.break_even(model, num_drafts=[num_draft])
    assert np.allclose(gains.speedup, stepcost.accept_length(rate, num_draft) / needed.accept_len)
    assert ((gains.speedup > 1) == (gains.accept_len > needed.accept_len)).all()
    assert (needed.possible == needed.rate.notna()).all()
    best = stepcost.best_num_draft(model, rate)
    assert (best.speedup >= 1).all() and (best.speedup >= gains.groupby("batch").speedup.max().to_numpy() - 1e-12).all()


def test_a_measured_acceptance_brings_its_uncertainty():
    from k2eagle.accept import summarize  # here, because it imports torch
    model = stepcost.fit(sweep({"weights": 0.01, "experts": 0, "requests": 1e-5, "tokens": 1e-4, "draft": 3e-4, "speculation": 0, "sharpness": 1.0}, 0.01), sharpness=1)
    kept = np.random.default_rng(0).binomial(30, [[0.3, 0.1, 0.05], [0.7, 0.5, 0.3]] * 6)
    counts = pd.DataFrame(np.sort(kept)[:, ::-1], columns=["pos_1", "pos_2", "pos_3"]).assign(accepted=lambda own: own.sum(axis=1), drafts=30, drafted=90)
    measured = summarize(counts)
    known, drawn = (stepcost.speedups(model, acceptance, [8], [3]).iloc[0] for acceptance in (measured.per_position, measured))
    assert drawn.accept_len == pytest.approx(measured.accept_len) and drawn.speedup == pytest.approx(known.speedup)
    assert drawn.high - drawn.low > 3 * (known.high - known.low)
    assert (drawn.high - drawn.low) * drawn.cost == pytest.approx(measured.ci[1] - measured.ci[0], rel=0.25)
    with pytest.raises(ValueError, match="acceptance at 3 positions, asked for K = 5"):
        stepcost.speedups(model, measured, [8], [5])


def test_intervals_hold_the_truth():
    machine = {"weights": 0.010, "experts": 0.03, "requests": 2e-5, "tokens": 1e-4, "draft": 5e-4, "speculation": 1e-3, "sharpness": 2.0}
    cells = pd.DataFrame([(b, k) for b in (1, 8, 48) for k in (2, 5)], columns=["batch", "num_draft"])
    truth, held = costs(machine, cells), []
    for seed in range(12):
        table = stepcost.break_even(stepcost.fit(sweep(machine, 0.02, seed), 384, 8, draws=60, seed=seed), [1, 8, 48], [2, 5])
        held.append((table.low <= truth) & (truth <= table.high))
    assert 0.85 <= np.mean(held) <= 1.0, np.mean(held)  # the sharpness is found, too: 2 is among those that are tried


@pytest.mark.parametrize("spread", [0.01, 0.05])
def test_more_noise_gives_wider_intervals(spread):
    machine = {"weights": 0.010, "experts": 0.0, "requests": 2e-5, "tokens": 1e-4, "draft": 5e-4, "speculation": 1e-3, "sharpness": 1.0}
    quiet, loud = (stepcost.break_even(stepcost.fit(sweep(machine, s, 1), sharpness=1)) for s in (spread / 4, spread))
    assert (loud.high - loud.low).mean() > 2 * (quiet.high - quiet.low).mean()


@many
@given(st.sampled_from(["batch", "num_draft", "step_s"]), st.sampled_from([float("nan"), float("inf"), -1.0, -0.5, None]), st.integers(0, len(GRID) - 1))
def test_impossible_points_are_refused_with_their_row(column, value, row):
    points = sweep({"weights": 0.01, "experts": 0, "requests": 0, "tokens": 1e-4, "draft": 0, "speculation": 0, "sharpness": 1.0}).astype(float)
    points.loc[row, column] = value
    with pytest.raises(ValueError, match=f"row {row}: .*expected a batch from 1 on"):
        stepcost.fit(points)


@few
@given(st.lists(st.sampled_from(range(len(GRID))), min_size=1, max_size=9, unique=True))
def test_too_few_points_are_refused_or_fitted(rows):
    points = sweep({"weights": 0.01, "experts": 0, "requests": 1e-5, "tokens": 1e-4, "draft": 3e-4, "speculation": 0, "sharpness": 1.0}, 0.01).loc[rows]
    try:
        model = stepcost.fit(points, draws=5)
    except ValueError as error:
        assert "expected" in str(error) and "measure" in str(error)
    else:
        assert len(points) >= len(model.terms) and np.isfinite(model.points.fitted_s).all()
        assert ("no-spare-points" in [f.code for f in model.findings]) == (len(points) == len(model.terms))


# paired ratios

speeds = st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=2, max_size=12)


@many
@given(speeds, st.floats(1e-3, 1e3))
def test_ratio_turns_around_and_knows_no_unit(pairs, factor):
    measured, baseline = np.array(pairs).T
    one, back, scaled = paired.compare(measured, baseline), paired.compare(baseline, measured), paired.compare(measured * factor, baseline * factor)
    assert one.ratio * back.ratio == pytest.approx(1) and scaled.ratio == pytest.approx(one.ratio)
    if np.isfinite(one.low):
        assert one.low <= one.ratio * (1 + 1e-9) and one.ratio <= one.high * (1 + 1e-9)
        assert scaled.low == pytest.approx(one.low, rel=1e-6) and one.smallest >= 1


@many
@given(speeds, st.integers(0, 11), st.sampled_from([0.0, -3.0, float("nan"), float("inf")]))
def test_impossible_speeds_are_refused_with_their_place(pairs, place, value):
    measured, baseline = np.array(pairs).T
    place %= len(measured)
    measured[place] = value
    with pytest.raises(ValueError, match=rf"measured\[{place}\] is .*expected a finite number above 0"):
        paired.compare(measured, baseline)


@few
@given(st.integers(2, 6), st.integers(1, 12), st.integers(0, 5))
def test_every_configuration_has_every_place_equally_often(configurations, repeats, seed):
    order = paired.run_order([f"c{number}" for number in range(configurations)], repeats, seed)
    assert (order.groupby("repeat").config.nunique() == configurations).all()
    whole = order[order.repeat <= repeats // configurations * configurations]
    assert whole.empty or whole.groupby(["config", "place"]).size().nunique() == 1


def test_no_difference_is_seen_where_there_is_none():
    rng = np.random.default_rng(0)
    verdicts = [paired.compare(rng.lognormal(0, 0.05, 5), rng.lognormal(0, 0.05, 5)).verdict for _ in range(300)]
    assert 0.93 <= verdicts.count("no difference seen") / 300 <= 0.98


# published numbers

def test_lengths_of_published_counts():
    assert stepcost.accept_length([0.648, 0.419, 0.278], 3) == pytest.approx(2.345)  # card of k-l-lambda/kimi-k2.6-eagle3-mla
    assert stepcost.accept_length([0.633, 0.404, 0.264], 3) == pytest.approx(2.30, abs=0.002)
    assert stepcost.accept_length(np.array([4098, 2344, 1339, 783, 394]) / 6590, 5) == pytest.approx(2.359, abs=0.001)  # vllm issue 42764
    assert stepcost.accept_length(np.array([4530, 2544, 1500, 891, 538]) / 7431, 5) == pytest.approx(2.346, abs=0.001)


@pytest.mark.parametrize("experts,tokens,read", [(384, (1, 2, 4, 8, 16, 32, 64, 128, 256), (8, 15.8, 31.0, 59.5, 109.8, 188.2, 284.2, 358.1, 382.2)),
                                                 (256, (4, 32, 128), (30.5, 163.3, 251.6))], ids=["kimi-k2", "deepseek-v3"])
def test_experts_read_by_known_models(experts, tokens, read):
    assert stepcost.experts_read(np.array(tokens), experts, 8) == pytest.approx(read, abs=0.06)  # the survey's table of N(T)


# SpecForge's SpecBundle table (docs/spec_bundle/public/raw_data/data.json, read at a6b6b023): K = 3, batch 8; accept length and speedup
BATCH_8 = {
    "Kimi-K2-Instruct": [(3.271, 1.47), (3.468, 1.78), (2.390, 1.24), (3.365, 1.67), (3.163, 1.68), (2.985, 1.49)],
    "Qwen3-235B-A22B": [(2.876, 1.53), (3.229, 1.98), (2.345, 1.54), (3.239, 1.93)],
    "Llama-3.3-70B": [(2.961, 2.29), (2.842, 2.25), (2.926, 2.30), (2.318, 1.85)],
}


def test_break_even_of_kimi_k2_at_batch_8_is_near_2():
    lengths, gains = np.array(BATCH_8["Kimi-K2-Instruct"]).T
    found = stepcost.implied_cost(lengths, gains, 3)
    low, high = paired.mean_interval(found)
    assert found.mean() == pytest.approx(2.0, abs=0.05) and low < 2.0 < high


def test_costs_of_published_models_stand_in_the_order_of_their_experts():
    found = {name: stepcost.implied_cost(*np.array(pairs).T, 3).mean() for name, pairs in BATCH_8.items()}
    growth = {"Kimi-K2-Instruct": 384, "Qwen3-235B-A22B": 128}
    growth = {name: stepcost.experts_read(32, experts, 8) / stepcost.experts_read(8, experts, 8) for name, experts in growth.items()} | {"Llama-3.3-70B": 1.0}
    assert sorted(found, key=found.get) == sorted(growth, key=growth.get) == ["Llama-3.3-70B", "Qwen3-235B-A22B", "Kimi-K2-Instruct"]
    assert found["Llama-3.3-70B"] == pytest.approx(1.27, abs=0.02)  # dense at batch 8: a draft token costs 0.09
    for name in growth:
        assert 1 <= found[name] <= growth[name] * found["Llama-3.3-70B"]  # experts are a part of a step only


def test_one_k_of_kimi_k2_foretells_the_others():
    mean = {3: 2.00, 5: 2.34, 7: 2.63}  # over six workloads of the same table, batch 8
    model = stepcost.fit(pd.DataFrame({"batch": 8, "num_draft": [0, 3], "step_s": [1.0, mean[3]]}), 384, 8, terms=("weights", "experts"))
    for num_draft in (5, 7):
        assert model.costs(8, num_draft)[0, 0] == pytest.approx(mean[num_draft], rel=0.05)


def test_campaign_kimi_k25_on_eight_gpus():
    # SGLang with CUDA graphs, K = 3, one stream, plain 63.6 tokens a second: the campaign's table
    ours, known = stepcost.implied_cost(1.00, 40.8 / 63.6, 3), stepcost.implied_cost(1.65, 62.9 / 63.6, 3)
    assert known == pytest.approx(1.67, abs=0.005) and ours == pytest.approx(1.56, abs=0.005)
    assert abs(ours / known - 1) < 0.08  # one machine, one K: nearly one cost, whatever the drafter hits
    assert [round(length / known, 1) for length in (2.0, 3.0)] == [1.2, 1.8]
    assert stepcost.rate_needed(known, 3) == pytest.approx(0.42, abs=0.005)  # the rate per draft that would just have paid


def test_cost_where_accept_length_was_counted():
    # vllm issue 24243: K = 6, 63,669 of 43,221 steps' drafts kept; 215.84 s became 133.24 s at 10 requests, 382.29 s became 224.20 s at one
    length = 1 + 63_669 / 43_221
    many, one = (stepcost.implied_cost(length, gain, 6) for gain in (215.84 / 133.24, 382.29 / 224.20))
    assert length == pytest.approx(2.473, abs=1e-3) and one == pytest.approx(1.45, abs=0.01) and many == pytest.approx(1.53, abs=0.01)


# measured steps

@pytest.mark.parametrize("target,experts", [("moe", (64, 4)), ("dense", (None, None))])
@pytest.mark.parametrize("by", ["point", "batch", "num_draft"])
def test_real_steps_are_predicted_within_a_tenth(root, target, experts, by):
    steps = pd.read_csv(root / "outputs" / "reference" / "stepcost" / "steps.csv")  # benchmarks/stepcost.py, one CPU thread
    points = steps[steps.target == target].groupby(["batch", "num_draft"], as_index=False).step_s.median()
    held = stepcost.leave_out(points, by, *experts)
    assert held[~held.beyond].error.abs().mean() < 0.06
    assert held[~held.beyond].error.abs().max() < (0.10 if target == "moe" else 0.25)  # the dense model's kernels jump: see the notebook
