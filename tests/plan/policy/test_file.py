"""What is read is what was written, every fault has its line, and evidence is that of the runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import explorer
from explorer.errors import UnreadableFile
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.file import evidence_of
from explorer.plan.policy.strict_yaml import LARGEST_BYTES, Document
from explorer.record import Failure
from explorer.record.base import MOST
from explorer.record.files import Evidence, PolicyFile
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy, Unit
from explorer.record.run import PipelinePlan, Ranks
from tests import graphs
from tests.graphs import GRAPH, SPEC

texts = st.text(max_size=12)
names = texts | st.sampled_from(["no", "1", "1e5", "~", "=", "<<", "0x1", "2020-01-01", "null", "a: b", "- x", "1:30"])
units = st.builds(
    Unit,
    blocks=st.lists(names, min_size=1, max_size=9).map(tuple),
    action=st.sampled_from(["recompute", "save_ops", "offload"]),
    save_ops=st.lists(names, max_size=2).map(tuple),
)
policies = st.builds(
    Policy,
    units=st.lists(units, max_size=4).map(tuple),
    preserve_rng_state=st.booleans(),
    use_reentrant=st.booleans(),
    determinism_check=st.sampled_from(["default", "none"]),
    early_stop=st.booleans(),
    running_stats=st.sampled_from(["once", "every_forward"]),
    restore_rng=st.lists(names, max_size=2).map(tuple),
)
numbers = st.floats(allow_nan=False)
arguments = st.dictionaries(
    names, st.integers(-MOST, MOST) | st.floats(-1e300, 1e300) | names | st.booleans(), max_size=3
)
models = st.builds(ModelRef, target=names, size=st.none() | names, arguments=arguments)
plans = st.builds(
    PipelinePlan,
    stages=st.lists(st.lists(names, max_size=3).map(tuple), max_size=3).map(tuple),
    n_microbatches=st.integers(1, 99),
    n_ranks=st.none() | st.integers(1, 9),
    actions=st.lists(st.lists(names, max_size=3).map(tuple), max_size=2).map(tuple),
)
sizes = st.none() | st.integers(0, 2**62)
evidence = st.builds(
    Evidence,
    device=names,
    torch_version=names,
    input_shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=2).map(tuple),
    step_peak_bytes=sizes,
    time_ratio=st.none() | numbers,
    verdict=st.none() | st.sampled_from(["bitwise equal", "rounding", "state moved", "different"]),
)
files = st.builds(
    PolicyFile,
    policy=policies,
    model=st.none() | models,
    fingerprint=st.none() | names,
    blocks=st.dictionaries(names, st.integers(0, 9), max_size=3),
    pipeline=st.none() | plans,
    ranks=st.none() | st.builds(Ranks, n_ranks=st.integers(1, 64), reshard=st.booleans()),
    evidence=st.none() | evidence,
)


@settings(max_examples=25, deadline=None)
@given(files)
def test_what_is_read_is_what_was_written(file: PolicyFile) -> None:
    assert policy_file.loads(policy_file.dumps(file)) == file


@settings(max_examples=25, deadline=None)
@given(files, st.integers(0, 10_000), st.text(max_size=3))
def test_a_damaged_file_gives_an_error_of_ours_or_a_policy(file: PolicyFile, at: int, junk: str) -> None:
    text = policy_file.dumps(file)
    at %= len(text)
    try:
        policy_file.loads(text[:at] + junk + text[at + 1 :])
    except UnreadableFile as error:
        assert "\n" not in error.sentence


@settings(max_examples=25, deadline=None)
@given(st.text() | st.text(alphabet="ab:-[]{}&*!#'\" \n0~", max_size=40))
def test_any_text_gives_an_error_of_ours(text: str) -> None:
    with pytest.raises(UnreadableFile, match=r"\A[^\n]*\Z"):
        policy_file.loads(text)


GOOD = """\
version: 1
model:
  target: sample_models/gpt.py
  fingerprint: '0123456789abcdef'
policy:
  units:
  - blocks.0
  - [blocks.1, blocks.2]
  - {blocks: [blocks.3], action: offload}
  use_reentrant: false
evidence:
  device: cpu
  torch_version: '2.13'
  step_peak_bytes: 5
"""


def test_the_short_forms_of_units() -> None:
    file = policy_file.loads(GOOD)
    assert file.policy == Policy(
        units=(
            Unit(blocks=("blocks.0",)),
            Unit(blocks=("blocks.1", "blocks.2")),
            Unit(blocks=("blocks.3",), action="offload"),
        )
    )
    assert file.fingerprint == "0123456789abcdef" and file.evidence and file.evidence.step_peak_bytes == 5


@pytest.mark.parametrize(("old", "new", "words"), [
    ("version: 1", "version: 2", ["line 1", "version 2", "reads version 1"]),
    ("version: 1", "version: true", ["version True"]),
    ("version: 1", "versoin: 1", ["no field `version`"]),
    ("use_reentrant", "use_reentrent", ["line 10", "policy.use_reentrent", "did you mean use_reentrant?"]),
    ("use_reentrant: false", "use_reentrant: 'false'", ["line 10", "policy.use_reentrant", "bool", "str"]),
    ("step_peak_bytes: 5", "step_peak_bytes: 5 MiB", ["line 14", "evidence.step_peak_bytes", "int"]),
    ("action: offload", "action: upload", ["line 9", "policy.units[2].action", "upload"]),
    ("- blocks.0", "- 7", ["line 7", "policy.units[0]"]),
    ("[blocks.1, blocks.2]", "[blocks.1, 2]", ["line 8", "policy.units[1]", "str"]),
    ("'0123456789abcdef'", "12345678", ["line 4", "fingerprint", "quotes"]),
    ("  fingerprint:", "  blocks: [blocks.0]\n  fingerprint:", ["line 4", "blocks must be names"]),
    ("evidence:", "evidences:", ["line 11", "unknown field evidences"]),
    ("policy:", "plan_b:", ["line 5", "plan_b", "policy is missing"]),
    ("  use_reentrant: false", "  units: []", ["line 10", "units is there twice"]),
    ("- blocks.0", "- !!python/name:os.system blocks.0", ["line 7", "tag"]),
])  # fmt: skip
def test_each_fault_says_where_and_what(old: str, new: str, words: list[str]) -> None:
    assert old in GOOD
    with pytest.raises(UnreadableFile) as caught:
        policy_file.loads(GOOD.replace(old, new, 1))
    for word in words:
        assert word in str(caught.value)


def test_all_faults_of_one_file_are_named_at_once() -> None:
    text = GOOD.replace("use_reentrant", "use_reentrent").replace("step_peak_bytes: 5", "step_peak_bytes: x")
    with pytest.raises(UnreadableFile, match=r"use_reentrent.*step_peak_bytes"):
        policy_file.loads(text.replace("- blocks.0", "- 7"))
        policy_file.loads(text.replace("- blocks.0", "- 7"))


@pytest.mark.parametrize(("n_faults", "ending"), [(20, "got int."), (21, "and more.")])
def test_twenty_faults_are_named(n_faults: int, ending: str) -> None:
    units = n_faults * "  - 7\n"
    with pytest.raises(UnreadableFile) as caught:
        policy_file.loads(f"version: 1\npolicy:\n  units:\n{units}")
    sentence = caught.value.sentence
    assert sentence.count("policy.units[") == 20 and sentence.endswith(ending), sentence


def test_the_file_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(GOOD)
    assert explorer.load_policy(path) == policy_file.loads(GOOD).policy
    with pytest.raises(UnreadableFile, match=r"nowhere\.yaml cannot be read"):
        explorer.load_policy(tmp_path / "nowhere.yaml")
    path.write_bytes(b"version: 1\n\xff")
    with pytest.raises(UnreadableFile, match="byte 11 is not UTF-8"):
        explorer.load_policy(path)
    path.write_text(GOOD.replace("use_reentrant", "reentrant"))
    with pytest.raises(UnreadableFile, match=r"policy\.yaml: .*line 10"):
        explorer.load_policy(path)


def test_loading_a_policy_needs_neither_torch_nor_numpy(tmp_path: Path, root: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(GOOD)
    check = f"import sys, explorer; explorer.load_policy({str(path)!r}); print({{'torch', 'numpy'}} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", check], cwd=root, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"


def test_the_text_reads_well() -> None:
    policy = Policy.recompute(["blocks.0", ("blocks.1", "blocks.2")])
    model = ModelRef(target="sample_models/gpt.py")
    text = policy_file.dumps(PolicyFile(policy=policy, model=model, fingerprint="12345678", blocks={"blocks.*": 3}))
    assert text.startswith("# A policy of Checkpoint Explorer")
    assert "- blocks.0\n" in text and "- [blocks.1, blocks.2]\n" in text
    assert yaml.safe_load(text)["model"]["fingerprint"] == "12345678"
    assert "    blocks.*: 3\n" in text


def test_an_empty_section_is_a_sentence_or_nothing() -> None:
    with pytest.raises(UnreadableFile, match=r"line 2: policy is empty; to recompute nothing, write policy: \{\}"):
        policy_file.loads("version: 1\npolicy:\n")
    file = policy_file.loads("version: 1\nmodel:\npolicy: {}\npipeline:\nevidence:\n")
    assert file == PolicyFile(policy=Policy())


@pytest.mark.parametrize(("text", "words"), [
    ("a: 1\nb: &x 2\n", "line 2: anchors and aliases"),
    ("a: 1\nb: *x\n", "line 2: anchors and aliases"),
    ("a: !!python/object:os.system 1\n", "line 1: the tag"),
    ("a: 1\n\na: 2\n", "line 3: the field a is there twice"),
    ("a: 1\n2: 3\n", "line 2: a field name must be text"),
    ("[" * 17 + "]" * 17, "line 1: more than 16 levels deep"),
    ("a: [1\n", "This is not YAML: line"),
    ("a: \x07\n", "This is not YAML: "),
    ("a" * (LARGEST_BYTES + 1), "more than 1048576 bytes"),
    ("a" * (LARGEST_BYTES + 1), "more than 1048576 bytes"),
    (f"[{'1,' * 30_000}]", "more than 30000 values"),
])  # fmt: skip
def test_what_does_not_belong_there(text: str, words: str) -> None:
    with pytest.raises(UnreadableFile) as caught:
        Document(text)
    assert words in caught.value.sentence


def test_every_value_knows_its_line() -> None:
    document = Document("a:\n  b: 1\n  c:\n  - x\n  - y\nd: 2024-01-01\n")
    assert document.plain == {"a": {"b": 1, "c": ["x", "y"]}, "d": "2024-01-01"}, "a date is its text"
    assert [document.line(path) for path in (("a",), ("a", "b"), ("a", "c", 1), ("d",))] == [1, 2, 5, 6]
    assert document.line(("a", "c", 7, "nothing")) == document.line(("a", "c")) == 3, "the nearest that is there"


PAIR = graphs.compared(GRAPH, SPEC)


def test_the_figures_are_those_of_both_runs() -> None:
    evidence = evidence_of(PAIR, GRAPH)
    assert evidence is not None
    assert evidence.step_peak_bytes == PAIR.candidate.step_peak_bytes
    assert evidence.baseline_step_peak_bytes == PAIR.baseline.step_peak_bytes
    assert evidence.saved_after_forward_bytes == PAIR.candidate.saved_after_forward_bytes
    assert (evidence.verdict, evidence.input_shapes) == (PAIR.verdict, GRAPH.input_shapes)
    assert evidence.baseline_policy is None, "everything is kept there"
    assert evidence_of(PAIR).input_shapes == ()


def test_a_baseline_with_a_policy_is_named() -> None:
    other = replace(PAIR.baseline.spec, policy=Policy.recompute(["head"]))
    pair = replace(PAIR, baseline=replace(PAIR.baseline, spec=other))
    assert evidence_of(pair).baseline_policy == other.policy


def test_a_run_that_was_cut_short_or_only_foreseen_proves_nothing() -> None:
    failure = Failure(kind="out of memory", sentence="full")
    assert evidence_of(replace(PAIR, candidate=replace(PAIR.candidate, failure=failure), failure=failure)) is None
    assert evidence_of(replace(PAIR, candidate=replace(PAIR.candidate, origin="predicted"))) is None
