"""How rows of levers rank: laws over any rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from explorer.plan import lever_text, levers
from explorer.plan.card.cards import parse_card
from explorer.record.fit import Fit, Judgement, LeverRow, PlayedStep
from explorer.record.graph import Lora, ModelRef
from explorer.record.policy import Policy, Unit
from explorer.record.run import RunSpec

SPEC = RunSpec(model=ModelRef(target="nets.py"))
AS_IS = PlayedStep(spec=SPEC, step_peak_bytes=1000, total_flops=100, fits=False)
KEYS = [lever.key for lever in levers.LEVERS]
ROWS = st.lists(
    st.builds(
        lambda keys, peak, flops, fits, effect: LeverRow(
            levers=tuple(keys),
            step=PlayedStep(spec=SPEC, step_peak_bytes=peak, total_flops=flops, fits=fits),
            judgement=Judgement(effect=effect),
        ),
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        st.integers(1, 1100),
        st.one_of(st.none(), st.integers(98, 104)),
        st.booleans(),
        st.sampled_from(levers.EFFECTS),
    ),
    max_size=8,
)
SINGLES = ROWS.map(lambda rows: list({row.levers[0]: _single(row) for row in rows}.values()))


def _single(row: LeverRow) -> LeverRow:
    return LeverRow(levers=row.levers[:1], step=row.step, judgement=row.judgement)


def figures(row: LeverRow) -> tuple[float, int]:
    return levers.price(row.step, AS_IS), levers.severity(row)


@given(ROWS)
def test_rows_that_fit_come_first_and_the_cheap_before_the_dear(rows: list[LeverRow]) -> None:
    ordered = levers.ranked(rows, AS_IS)
    assert sorted(map(repr, ordered)) == sorted(map(repr, rows))
    for row, after in zip(ordered, ordered[1:]):
        assert row.step.fits >= after.step.fits
        offloads, offloads_after = ((each.levers == (levers.OFFLOAD,)) for each in (row, after))
        if row.step.fits == after.step.fits:
            assert offloads <= offloads_after, "recompute may lie in the interval of its time"
        if row.step.fits == after.step.fits and offloads == offloads_after:
            (price, effect), (price_after, effect_after) = figures(row), figures(after)
            assert (max(1.0, price), effect) <= (max(1.0, price_after), effect_after), "the milder at equal price"


@given(ROWS)
def test_the_order_does_not_depend_on_the_order_of_play(rows: list[LeverRow]) -> None:
    keys = [(row.step.fits, *figures(row), row.step.needed_bytes, row.levers) for row in levers.ranked(rows, AS_IS)]
    backward = levers.ranked(rows[::-1], AS_IS)
    assert keys == [(row.step.fits, *figures(row), row.step.needed_bytes, row.levers) for row in backward]


@given(ROWS)
def test_what_is_dropped_is_beaten_and_what_stays_is_not(rows: list[LeverRow]) -> None:
    best = levers.undominated(rows, AS_IS)
    for row in rows:
        if row not in best:
            assert any(all(x <= y for x, y in zip(figures(other), figures(row))) for other in best)
    for row in best:
        for other in best:
            assert other is row or figures(other)[0] > figures(row)[0] or figures(other)[1] > figures(row)[1]


@given(SINGLES)
def test_a_combination_has_one_lever_of_a_group_and_none_that_takes_more(rows: list[LeverRow]) -> None:
    sets = levers.combinations(rows, AS_IS)
    assert () not in sets, "recompute alone is a single lever"
    assert len(set(map(repr, sets))) == len(sets)
    for chosen in sets:
        groups = [levers.BY_KEY[row.levers[0]].group for row in chosen]
        assert len(set(groups)) == len(groups)
        assert all(row.step.needed_bytes <= AS_IS.needed_bytes for row in chosen)
    worst = [max(map(levers.severity, chosen), default=0) for chosen in sets]
    assert worst == sorted(worst), "the mildest first"


@given(SINGLES)
def test_the_best_of_each_group_is_in_some_combination(rows: list[LeverRow]) -> None:
    tried = {row.levers[0] for chosen in levers.combinations(rows, AS_IS) for row in chosen}
    groups = {levers.BY_KEY[row.levers[0]].group for row in rows if row.step.needed_bytes <= AS_IS.needed_bytes}
    assert {levers.BY_KEY[key].group for key in tried} == groups - {levers.OFFLOAD}, "offload sets the policy"


@given(ROWS, ROWS)
def test_the_switch_hides_what_is_not_bitwise(rows: list[LeverRow], combined: list[LeverRow]) -> None:
    shown = levers.bitwise_only(Fit(as_is=AS_IS, rows=tuple(rows), combinations=tuple(combined)))
    n_bitwise = sum(row.judgement.effect == "bitwise" for row in (*rows, *combined))
    assert len(shown.rows) + len(shown.combinations) == n_bitwise
    assert all(row.judgement.effect == "bitwise" for row in (*shown.rows, *shown.combinations))


def test_levers_do_not_change_a_step_that_has_them() -> None:
    for lever in levers.LEVERS:
        parts = levers.Parts(True, ("0", "1"), "0|1", "head", blocks=("0",))
        changed = lever.change(
            RunSpec(model=ModelRef(target="nets.py"), optimizer_form="foreach", card=parse_card("24GiB", "", "")), parts
        )
        assert changed is not None
        again = lever.change(changed, parts)
        assert (again is None) == (lever.key != "accumulate")


def test_levers_together_are_the_changes_one_after_the_other() -> None:
    policy = Policy.recompute(["a"])
    spec = levers.under(SPEC, ("sgd", "accumulate", levers.RECOMPUTE), levers.Parts(), policy)
    assert (spec.optimizer, spec.n_accumulation, spec.policy) == ("sgd", 2, policy)


def test_the_line_of_the_attention_names_the_factory() -> None:
    own = "type(model).from_pretrained(name, "
    for target, call in (("hf:LlamaConfig", own), ("nets.py:gpt", "gpt("), ("nets.py", "build(")):
        step = PlayedStep(spec=RunSpec(model=ModelRef(target=target)), step_peak_bytes=1)
        (line,) = lever_text.script_lines(LeverRow(levers=("attention",), step=step))
        assert line == f'model = {call}attn_implementation="sdpa")'


def test_the_line_of_a_policy_is_the_policy() -> None:
    import explorer

    for units in ((Unit(blocks=("a",)), Unit(blocks=("b", "c"))), (Unit(blocks=("a",), action="offload"),)):
        spec = levers.under(SPEC, (levers.RECOMPUTE,), levers.Parts(), Policy(units=units))
        row = LeverRow(levers=(levers.RECOMPUTE,), step=PlayedStep(spec=spec, step_peak_bytes=1))
        (line,) = lever_text.script_lines(row)
        code = line.removeprefix("explorer.apply_policy(model, ").removesuffix(")")
        assert eval(code, {"explorer": explorer}) == spec.policy


def test_a_price_that_prints_as_nothing_is_none() -> None:
    """The loss over chunks computes a small last layer twice: it comes before a lever that changes the training."""
    as_is = PlayedStep(spec=SPEC, step_peak_bytes=1000, total_flops=100_000)
    mild = LeverRow(
        levers=("chunks",),
        step=PlayedStep(spec=SPEC, step_peak_bytes=900, total_flops=100_040),
        judgement=Judgement(effect="rounding"),
    )
    other = LeverRow(
        levers=("sgd",),
        step=PlayedStep(spec=SPEC, step_peak_bytes=800, total_flops=100_000),
        judgement=Judgement(effect="different"),
    )
    assert levers.ranked([other, mild], as_is) == (mild, other)


def test_the_line_of_an_optimizer_names_its_form_and_its_momentum() -> None:
    def line(key: str, **fields: object) -> str:
        spec = replace(SPEC, **fields)
        (line,) = lever_text.script_lines(LeverRow(levers=(key,), step=PlayedStep(spec=spec, step_peak_bytes=1)))
        return line

    sgd = "optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum="
    assert line("foreach", optimizer="sgd", momentum=0.9, optimizer_form="for-loop") == f"{sgd}0.9, foreach=False)"
    assert line("sgd", optimizer="sgd", optimizer_form="fused") == f"{sgd}0, fused=True)"
    assert line("sgd", optimizer="sgd") == f"{sgd}0)", "the play has no momentum, whose state would take bytes"
    assert line("fused", optimizer="adamw", optimizer_form="fused").endswith("lr=lr, fused=True)")


def test_every_line_is_python() -> None:
    """A line whose second half is a comment was pasted, and its second half was lost."""
    lora = Lora(targets=r"a|b", quantize="nf4")
    for target in ("hf:LlamaConfig", "nets.py"):
        spec = RunSpec(model=ModelRef(target=target), lora=lora)
        for lever in levers.LEVERS:
            row = LeverRow(levers=(lever.key,), step=PlayedStep(spec=spec, step_peak_bytes=1))
            code = "\n".join(lever_text.script_lines(row))
            compile(code, lever.key, "exec")
            for call in ("get_peft_model(", "apply_policy(", 'quant_type="nf4"'):
                assert all(call not in line.partition("#")[2] for line in code.splitlines())


def test_offload_without_a_card_says_that_it_is_for_a_gpu() -> None:
    """On a CPU nothing moves: the line alone would save nothing there."""
    for spec, is_on_cpu in ((SPEC, True), (replace(SPEC, card=parse_card("24GiB", "", "")), False)):
        row = LeverRow(levers=(levers.OFFLOAD,), step=PlayedStep(spec=spec, step_peak_bytes=1))
        assert ("On a GPU" in lever_text.script_lines(row)[0]) is is_on_cpu
