"""How rows of levers rank: laws over any rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def single(key: str, peak: int, flops: int = 100, **fields: object) -> LeverRow:
    step = PlayedStep(spec=SPEC, step_peak_bytes=peak, total_flops=flops, fits=False)
    return LeverRow(levers=(key,), step=step, judgement=Judgement(**fields))  # type: ignore[arg-type]


def keys_of(sets: Iterable[Sequence[LeverRow]]) -> list[tuple[str, ...]]:
    return [tuple(row.levers[0] for row in chosen) for chosen in sets]


def test_a_lever_that_alone_saves_nothing_is_combined_and_one_that_takes_a_byte_more_is_not() -> None:
    rows = [single("sgd", 1000, effect="different"), single("accumulate", 1001, effect="rounding")]
    assert keys_of(levers.combinations(rows, AS_IS)) == [("sgd",)]


def test_sets_are_ordered_by_their_worst_lever_and_then_by_size() -> None:
    rows = [
        single("sgd", 900, effect="different"),
        single("accumulate", 900, effect="rounding"),
        single("attention", 900, effect="bitwise"),
    ]
    assert keys_of(levers.combinations(rows, AS_IS)) == [
        ("attention",), ("accumulate",), ("accumulate", "attention"),
        ("sgd",), ("sgd", "attention"), ("sgd", "accumulate"), ("sgd", "accumulate", "attention"),
    ]  # fmt: skip


def test_of_a_group_a_lever_stays_that_another_does_not_beat_in_price_effect_and_bytes() -> None:
    """Of equal levers the first one stays."""
    first, equal = single("foreach", 900, effect="rounding"), single("fused", 900, effect="rounding")
    lower, milder = single("sgd", 899, effect="different"), single("adamw8bit", 950, effect="bitwise")
    dearer = single("sgd", 900, 101, effect="rounding")
    for group, staying in (
        ([first, equal], ["foreach"]), ([first, dearer], ["foreach"]),
        ([first, lower], ["foreach", "sgd"]), ([first, milder], ["foreach", "adamw8bit"]),
    ):  # fmt: skip
        assert sorted(keys_of(levers.combinations(group, AS_IS))) == sorted((key,) for key in staying)


def test_settings_of_an_allocator_are_added_to_those_of_the_card() -> None:
    def options(key: str, before: str) -> str | None:
        changed = levers.BY_KEY[key].change(replace(SPEC, card=parse_card("24GiB", before, "")), levers.Parts())
        return changed and changed.card and changed.card.options

    assert options(levers.SEGMENTS, "") == "expandable_segments:True"
    divided = "roundup_power2_divisions:4"
    assert options(levers.MAX_SPLIT, divided) == f"{divided},max_split_size_mb:128"
    assert options(levers.SEGMENTS, "expandable_segments:False") is None, "a choice of the user stays"
    assert levers.BY_KEY[levers.SEGMENTS].change(SPEC, levers.Parts()) is None, "without a card there is no allocator"


def test_the_form_of_an_optimizer_is_changed_where_torch_has_forms() -> None:
    """On a card torch takes foreach by default, on a CPU the loop."""
    card = parse_card("24GiB", "", "")

    def forms(**fields: object) -> list[str]:
        spec = replace(SPEC, **fields)
        changed = [levers.BY_KEY[key].change(spec, levers.Parts()) for key in ("foreach", "fused")]
        return [each.optimizer_form for each in changed if each is not None]

    for optimizer in ("adamw", "sgd"):
        assert forms(optimizer=optimizer) == ["fused"]
        for by_foreach in ({"card": card}, {"device": "cuda"}, {"optimizer_form": "foreach"}):
            assert forms(optimizer=optimizer, **by_foreach) == ["for-loop", "fused"]
        assert forms(optimizer=optimizer, optimizer_form="for-loop", card=card) == ["fused"]
        assert forms(optimizer=optimizer, optimizer_form="fused", card=card) == []
    assert forms(optimizer="adamw8bit", card=card) == forms(optimizer="none", card=card) == []


def test_a_lever_changes_what_it_names_and_nothing_else() -> None:
    card = parse_card("24GiB", "", "")
    spec, parts = replace(SPEC, card=card), levers.Parts(True, ("0", "1"), "0|1", "head", blocks=("0", "1"))
    fields = {
        levers.SEGMENTS: "card", levers.MAX_SPLIT: "card", "foreach": "optimizer_form", "fused": "optimizer_form",
        "sgd": "optimizer", "adamw8bit": "optimizer", "accumulate": "n_accumulation", "autocast": "autocast",
        "dtype": "dtype", "attention": "model", "chunks": "chunked_layer", "lora": "lora", "qlora": "lora",
        "freeze": "frozen", "offload": "policy",
    }  # fmt: skip
    changes = {lever.key: changed for lever, changed in levers.levers_for(spec, parts)}
    for key, changed in changes.items():
        assert changed != spec and replace(changed, **{fields[key]: getattr(spec, fields[key])}) == spec
    assert changes.keys() == fields.keys() == levers.BY_KEY.keys()
    assert changes["accumulate"].n_accumulation == 2 and changes["chunks"].chunked_layer == "head"
    assert (changes["lora"].lora, changes["qlora"].lora) == (Lora(targets="0|1"), Lora(targets="0|1", quantize="nf4"))
    assert changes["freeze"].frozen == ("0", "1")
    assert [(unit.blocks, unit.action) for unit in changes["offload"].policy.units] == [
        (("0",), "offload"), (("1",), "offload"),
    ]  # fmt: skip
