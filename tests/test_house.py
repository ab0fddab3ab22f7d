"""The house keeps its own rules, one test a rule, each telling every fault at once.

Rings and rooms: who may import whom. Sizes: rings, files, functions, parameters. Words: docstrings, used names, retired
words.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from explorer import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "explorer"
STANDARD = sys.stdlib_module_names

# ring -> (rings of ours it may import, outside libraries it may import)
RINGS: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "child_process": ({"errors"}, set()),
    "record": ({"errors"}, {"msgspec"}),
    "plan": ({"record", "errors"}, {"msgspec", "numpy", "highspy", "yaml"}),
    "engine": ({"plan", "record", "errors", "child_process"}, {"msgspec", "torch", "torchviz", "numpy", "elftools"}),
    "jobs": ({"record", "errors", "child_process"}, {"msgspec", "platformdirs"}),
    "view": ({"plan", "record", "errors"}, {"msgspec", "plotly", "numpy"}),
    "ui": ({"jobs", "view", "plan", "record", "errors"}, {"msgspec", "starlette", "streamlit"}),
    "own_loop": (
        {"engine", "jobs", "view", "plan", "record", "errors"},
        {"msgspec", "torch", "transformers", "lightning", "pytest"},
    ),
    "cli": ({"jobs", "view", "plan", "record", "errors"}, {"msgspec", "typer", "rich"}),
    "app": ({"ui"}, {"streamlit", "starlette"}),
    "sample_models": (set(), {"torch"}),
}
SLICES = ("lab", "pipeline")
"""Folders with rooms of these rings: a room imports what its ring may, its ring, and such rooms of its own slice."""
for ring in ("child_process", "record", "plan", "jobs", "view", "ui", "cli"):
    RINGS[ring][0].add("slices")
RINGS["slices"] = ({"errors"}, set())
for slice in SLICES:
    RINGS[slice] = (set(), set())
    for ring in ("record", "plan", "engine", "jobs", "view", "ui", "cli"):
        ours, outside = RINGS[ring]
        RINGS[f"{slice}/{ring}"] = (ours | {ring} | {f"{slice}/{inner}" for inner in ours}, outside)
# msgspec is where records come from: whoever makes a changed copy of one may name it (`structs.replace`).
LATE = {
    "explorer/jobs/worker.py": {"engine"},
    "explorer/jobs/answers.py": {"engine", "plan"},
    "explorer/lab/jobs.py": {"lab/engine"},
    "explorer/pipeline/jobs.py": {"pipeline/engine", "pipeline/plan"},
    "explorer/cli/verbs/measure.py": {"own_loop"},
    "explorer/cli/verbs/run.py": {"own_loop"},
    "explorer/__init__.py": {"engine", "own_loop", "plan"},
}
"""The worker alone imports engines and planners, in a function; the public face imports by name on first use."""

# ring -> its rooms, from the one that may import all that follow to the one that imports none of them.
# A file beside the rooms is a room of its own. Rooms that stand on one line do not import each other.
ROOMS: dict[str, list[str]] = {
    "engine": ["ranks", "compare", "bench", "model", "watch", "policy", "device", "state", "imaginary"],
    "pipeline/engine": [
        "run torchrun_rank", "profile", "stage_bench rank", "in_process", "pass_readings", "build torch_adapter",
        "stages", "microbatches tape",
    ],
    "plan": [
        "recorded_fit", "lever_text", "summary recognize levers", "export why planners guard", "policy",
        "hazards predict", "card", "memory", "challenges local_models", "catalogue budget_text",
        "names sizes factory_text",
    ],
    "lab/engine": ["run", "lessons", "kit"],
    "lab/engine/lessons": ["*"],
    "view": ["report", "compare memory graph", "text", "drawing"],
    "ui": ["navigation server", "explore runs", "shared", "session components"],
    "cli": ["main", "verbs", "report", "options", "worker", "command"],
}  # fmt: skip


@cache
def sources() -> tuple[Path, ...]:
    return (ROOT / "app.py", *sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "sample_models").rglob("*.py")))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text_of(path), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Of the whole file: every test looks at all of them, and walking costs more than looking."""
    return tuple(ast.walk(tree(path)))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in sources()}


def ring_of(module: str) -> str | None:
    """None: the face of the package, which belongs to no ring."""
    top, _, rest = module.partition(".")
    if top != "explorer":
        return top
    ring, _, inner = rest.partition(".")
    if ring in SLICES and inner:
        return f"{ring}/{inner.partition('.')[0]}"
    return ring if ring in RINGS else None


def imports(statements: Iterable[ast.AST]) -> Iterator[str]:
    """Full names of imported modules; of `from package import name` the name too, where it is a module."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, "import by full name"
            module = statement.module or ""
            for alias in statement.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner in modules() or module == "explorer" else module


@cache
def imported(path: Path) -> list[str]:
    return sorted(set(imports(nodes(path))))


def test_rings_import_only_what_lies_further_in() -> None:
    wrong = []
    for module, path in modules().items():
        ring = ring_of(module)
        if ring is None:
            continue
        ours, outside = RINGS[ring]
        for name in imported(path):
            top = name.partition(".")[0]
            if top == "explorer":
                target = ring_of(name)
                late = LATE.get(name_of(path), set())
                if target not in (None, ring) and target not in ours | late:
                    wrong.append(f"{name_of(path)} ({ring}) imports {name}")
            elif top not in STANDARD and top not in outside:
                wrong.append(f"{name_of(path)} ({ring}) imports {name}")
    assert not wrong, "\n".join(wrong)


def room_of(module: str, house: str) -> str | None:
    """Which room of `house` (a ring, or a room with rooms of its own) a module stands in; None: in another house."""
    prefix = f"explorer.{house.replace('/', '.')}."
    return module.removeprefix(prefix).partition(".")[0] if module.startswith(prefix) else None


def rank_of(room: str, floors: list[str]) -> int | None:
    for rank, floor in enumerate(floors):
        if room in floor.split():
            return rank
    return floors.index("*") if "*" in floors else None


def faults_between_rooms(house: str, floors: list[str]) -> Iterator[str]:
    for module, path in modules().items():
        room = room_of(module, house)
        if room is None:
            continue
        rank = rank_of(room, floors)
        if rank is None:
            yield f"{name_of(path)}: {room} is no room of {house}; name it in ROOMS"
            continue
        for name in imported(path):
            target = room_of(name, house)
            if target in (None, room):
                continue
            below = rank_of(str(target), floors)
            if below is None or below <= rank:
                yield f"{name_of(path)} ({house}/{room}) imports {name}"


def test_rooms_import_only_what_lies_below() -> None:
    wrong = [fault for house, floors in ROOMS.items() for fault in faults_between_rooms(house, floors)]
    assert not wrong, "\n".join(wrong)


def rooms_drawn(ring: str) -> list[set[str]]:
    """The floors of a ring in the picture of CONTRIBUTING.md: `ring/  top, beside it ▶ below`."""
    drawing = (ROOT / "CONTRIBUTING.md").read_text()
    line = next(line for line in drawing.splitlines() if line.startswith(f"{ring}/ "))
    return [{room.strip() for room in floor.split(",")} for floor in line.partition(" ")[2].split("▶")]


def test_contributing_draws_the_rooms_as_they_are() -> None:
    """Folders only: a file that stands beside them may be left out of the picture."""
    wrong = []
    for ring in ("engine", "plan", "view", "ui", "cli"):
        there = {path.name for path in (PACKAGE / ring).iterdir() if path.is_dir()}
        enforced = [floor for rooms in ROOMS[ring] if (floor := there & set(rooms.split()))]
        drawn = [floor for rooms in rooms_drawn(ring) if (floor := there & rooms)]
        if drawn != enforced:
            wrong.append(f"{ring}: drawn {drawn}, enforced {enforced}")
    assert not wrong, "\n".join(wrong)


def test_no_import_goes_in_a_circle() -> None:
    reached: dict[str, set[str]] = {
        module: {name for name in imported(path) if name in modules()} - {module, "explorer"}
        for module, path in modules().items()
    }
    settled: set[str] = set()
    while leaves := {module for module, targets in reached.items() if module not in settled and targets <= settled}:
        settled |= leaves
    circle = sorted(set(reached) - settled)
    assert not circle, f"import each other, or something that does: {circle}"


def test_the_laws_can_fail() -> None:
    assert list(imports(ast.parse("import torch").body)) == ["torch"]
    assert "explorer.engine.policy.apply" in imports(ast.parse("from explorer.engine.policy.apply import x").body)
    assert "torch" not in RINGS["ui"][1]
    upside_down = list(reversed(ROOMS["engine"]))
    assert any("engine/compare" in fault for fault in faults_between_rooms("engine", upside_down))


def test_files_stay_small() -> None:
    long = {name_of(path): n for path in sources() if (n := len(text_of(path).splitlines())) > 400}
    assert not long, f"more than one idea in a room: {long}"


BUDGETS = {
    "record": 15766, "plan": 119130, "engine": 143534, "jobs": 11248, "child_process": 3994,
    "view": 46949, "ui": 49397, "lab": 27056, "pipeline": 54771, "own_loop": 15049, "cli": 22346,
}  # fmt: skip
"""Tokens of each ring at most. A line budget was answered by denser lines, so lines may grow and tokens may not."""
TESTS_BUDGET = 55971
"""Lines of all tests at most."""
TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}


def n_tokens(text: str) -> int:
    return sum(token.type in TOKENS for token in tokenize.generate_tokens(io.StringIO(text).readline))


def test_the_tokens_of_each_ring_have_a_budget() -> None:
    rings = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rings == set(BUDGETS)
    sizes = {ring: sum(n_tokens(text_of(path)) for path in (PACKAGE / ring).rglob("*.py")) for ring in BUDGETS}
    over = {ring: size for ring, size in sizes.items() if size > BUDGETS[ring]}
    assert not over, f"tokens over the budget: {over}"


SCRIPTS_BUDGET = 34_043
"""Tokens of all scripts and style sheets that the product draws with."""
SCRIPT_COMMENT = re.compile(r"(?m)(^|\s)//.*$|/\*(?s:.*?)\*/")


def test_scripts_and_style_sheets_have_a_budget() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*") if path.suffix in (".js", ".css")]
    assert len(texts) > 10
    assert sum(len(re.findall(r"\w+|[^\w\s]", SCRIPT_COMMENT.sub("", text))) for text in texts) <= SCRIPTS_BUDGET


MOST_PER_THOUSAND = {
    "record": (41, 42, 0), "plan": (41, 91, 1), "engine": (33, 59, 2), "jobs": (28, 32, 0),
    "child_process": (14, 12, 0), "view": (49, 75, 1), "ui": (55, 35, 1), "lab": (31, 64, 3),
    "pipeline": (41, 82, 2), "own_loop": (29, 32, 0), "cli": (41, 30, 1),
}  # fmt: skip
"""Conditional expressions, comprehensions, and comprehensions that hold one, in 1,000 lines of code: only downwards."""
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def n_code_lines(path: Path) -> int:
    """Lines with a token, without docstrings and without strings that stand below a constant."""
    tokens = tokenize.generate_tokens(io.StringIO(text_of(path)).readline)
    lines = {line for token in tokens if token.type in TOKENS for line in range(token.start[0], token.end[0] + 1)}
    texts = [node for node in nodes(path) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return len(lines - {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)})


def density(paths: Iterable[Path]) -> tuple[int, ...]:
    n_lines, counts = 0, Counter[str]()
    for path in paths:
        n_lines += n_code_lines(path)
        for node in nodes(path):
            counts["conditions"] += isinstance(node, ast.IfExp)
            if isinstance(node, COMPREHENSIONS):
                counts["comprehensions"] += 1
                counts["nested"] += any(isinstance(part, COMPREHENSIONS) for part in list(ast.walk(node))[1:])
    return tuple(1000 * counts[kind] // n_lines for kind in ("conditions", "comprehensions", "nested"))


def test_the_density_of_each_ring_goes_down() -> None:
    found = {ring: density((PACKAGE / ring).rglob("*.py")) for ring in BUDGETS}
    dense = {ring: n for ring, n in found.items() if any(map(int.__gt__, n, MOST_PER_THOUSAND[ring]))}
    assert not dense, f"{dense}, at most {MOST_PER_THOUSAND}: name the steps"


def test_the_tests_have_a_budget() -> None:
    n_lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    assert n_lines <= TESTS_BUDGET


def test_any_is_rare() -> None:
    texts = [text_of(path) for path in sources()]
    n_words = sum(len(re.findall(r"\bAny\b", text)) for text in texts)
    assert 1000 * n_words < 8 * sum(len(text.splitlines()) for text in texts), n_words


RETIRED = re.compile(
    r"\b(foret(?:old|ell\w*)|(?:un)?foresee[ns]?|foresaw|anew|once more|nobody|somebody\w*|whoever)\b", re.IGNORECASE
)
"""Words that readers had to decode."""


def test_retired_words_do_not_come_back() -> None:
    assert not [name_of(path) for path in PACKAGE.rglob("*.py") if RETIRED.search(text_of(path))]


VAGUE_NAMES = set(
    re.findall(
        r"\w+",
        "asked foreseen foretold found given held kept known mine one own said seen taken told unforeseen wanted",
    )
)
"""Participles and pronouns: a name is a noun of the field. Fields of stored records keep the names they have."""
MOST_VAGUE_NAMES = {"record": 2, "plan": 9, "engine": 15, "view": 2, "pipeline": 5, "own_loop": 4}
"""A ring's number goes down with every file that is rewritten, never up."""


def names_defined(path: Path) -> Iterator[str]:
    """Functions, classes, parameters and variables that a file defines; fields of records are left out."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_names_are_nouns() -> None:
    vague = {
        ring: Counter(
            name
            for path in sorted((PACKAGE / ring).rglob("*.py"))
            for name in names_defined(path)
            if name in VAGUE_NAMES
        )
        for ring in BUDGETS
    }
    assert not {ring: n for ring, names in vague.items() if (n := names.total()) > MOST_VAGUE_NAMES.get(ring, 0)}, vague


MOST_WORDS_OF_A_SENTENCE = 25


def docstring_sentences(path: Path) -> Iterator[str]:
    """Sentences of every docstring and of every string that stands below a constant; drawings and tables left out."""
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines = [
                line for line in node.value.value.splitlines() if not re.search(r"[│├└─┄▶|]|\S  +\S", line.strip())
            ]
            for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", "\n".join(lines)):
                yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


def test_sentences_of_docstrings_are_short() -> None:
    long = [
        f"{name_of(path)}: {sentence}"
        for path in sources()
        for sentence in docstring_sentences(path)
        if len(sentence.split()) > MOST_WORDS_OF_A_SENTENCE
    ]
    assert not long, "\n".join(long)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name_of(path), node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code: without the docstring."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    told = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - told


NESTED_CONDITIONS = {"engine": 2, "own_loop": 1, "view": 1}
"""Conditional expressions that hold another one, at most; a ring's number goes down, never up."""


def test_a_condition_holds_no_other_condition() -> None:
    nested: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in nodes(path):
            inner = (part for part in ast.walk(node) if part is not node)
            if isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in inner):
                nested[ring_of(module_of(path)) or ""].append(f"{name_of(path)}:{node.lineno}")
    assert not {ring: lines for ring, lines in nested.items() if len(lines) > NESTED_CONDITIONS.get(ring, 0)}


def test_functions_fit_a_screen() -> None:
    long = [f"{path}:{node.lineno} {node.name}: {n}" for path, node in functions() if (n := body_lines(node)) > 45]
    assert not long, "\n".join(long)


def n_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that a caller passes, without self and cls."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def test_functions_take_at_most_five_parameters() -> None:
    many = [
        f"{path}:{node.lineno} {node.name}: {n}"
        for path, node in functions()
        if (n := n_parameters(node)) > 5 and not is_command(path)
    ]
    assert not many, "a record is missing:\n" + "\n".join(many)


def is_command(path: str) -> bool:
    """A verb of the command line or a factory of a sample model: its parameters are its options."""
    return path.startswith(("explorer/cli/verbs/", "explorer/pipeline/cli/", "sample_models/"))


def strangers_repeated(statements: Iterable[ast.AST]) -> Iterator[int]:
    """Lines that put what somebody else raised into words of ours without explorer.errors.message_of or said_by."""
    ours = {"ExplorerError", *dir(errors)}
    for handler in statements:
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None or handler.type is None:
            continue
        caught = {ast.unparse(kind) for kind in getattr(handler.type, "elts", [handler.type])}
        if caught & ours:
            continue
        for node in ast.walk(handler):
            is_text = isinstance(node, ast.Call) and ast.unparse(node.func) == "str" and bool(node.args)
            repeated = node.value if isinstance(node, ast.FormattedValue) else node.args[0] if is_text else None
            if isinstance(repeated, ast.Name) and repeated.id == handler.name:
                yield node.lineno


def test_what_others_raise_is_repeated_in_one_sentence() -> None:
    bare = [f"{name_of(path)}:{line}" for path in sources() for line in strangers_repeated(nodes(path))]
    assert not bare, f"message_of or said_by of explorer.errors says it in one line: {bare}"
    example = ast.parse("try: ...\nexcept ValueError as e: raise BadInput(f'{e}')\nexcept OSError as e: print(str(e))")
    assert list(strangers_repeated(ast.walk(example))) == [2, 3]


def test_files_leave_the_app_by_one_button() -> None:
    helper = "explorer/ui/shared/download.py"
    own = [name_of(path) for path in sources() if "download_button" in text_of(path) and name_of(path) != helper]
    assert not own, f"{helper} has `download` for: {own}"


def test_every_file_says_why_it_exists() -> None:
    silent = [name_of(path) for path in sources() if not ast.get_docstring(tree(path))]
    assert not silent


def public_definitions() -> Iterator[tuple[str, Path, int]]:
    for path in sources():
        if path.is_relative_to(PACKAGE):
            for node in tree(path).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    yield node.name, path, node.lineno
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in targets:
                        if isinstance(target, ast.Name) and not target.id.startswith("_"):
                            yield target.id, path, node.lineno


@cache
def words_used() -> Counter[str]:
    """How often each name is read: as a name, an attribute, an import, or a word of a string that is an identifier."""
    used: Counter[str] = Counter()
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                used[node.value] += 1
    return used


def test_every_public_name_is_used() -> None:
    """Used by the product: a name that only tests know is dead."""
    exempt = {"app", "about"}  # found by their decorator
    dead = [
        f"{name_of(path)}:{line} {name}"
        for name, path, line in public_definitions()
        if not words_used()[name] and name not in exempt and not name_of(path).startswith("explorer/cli/verbs/")
    ]
    assert not dead, "\n".join(dead)


def test_no_two_classes_share_a_name() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        if path.is_relative_to(PACKAGE):
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    where[node.name].append(name_of(path))
    twins = {name: paths for name, paths in where.items() if len(paths) > 1}
    assert not twins, twins


def test_the_app_process_never_imports_torch_and_the_package_is_cheap() -> None:
    check = (
        "import sys, explorer; cheap = {'torch', 'streamlit', 'plotly', 'numpy'} & set(sys.modules);"
        "import explorer.ui.navigation, explorer.jobs.client;"
        "print(cheap | {'torch'} & set(sys.modules) | {name for name in sys.modules if name.endswith('.engine')})"
    )
    ran = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


MOST_OWN_LOOP_MODULES = 90


@pytest.mark.parametrize("name", ["record_step", "watch", "judge", "auto_policy"])
def test_an_instrument_loads_no_planner_and_no_report(name: str) -> None:
    """Every rank of somebody's training imports it."""
    check = (
        f"import sys, explorer; explorer.{name}; print(*(m for m in sys.modules if m.partition('.')[0] in "
        "('explorer', 'plotly', 'streamlit', 'highspy', 'rich')))"
    )
    ran = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = ran.stdout.split()
    heavy = (
        "plotly",
        "streamlit",
        "highspy",
        "rich",
        "explorer.view",
        "explorer.plan.planners",
        "explorer.plan.predict",
    )
    assert not [module for module in modules if module.startswith(heavy)]
    assert 0 < len(modules) < MOST_OWN_LOOP_MODULES, sorted(modules)


def test_top_level_holds_what_was_agreed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {name.partition("/")[0] for name in listed.split("\n") if name and not name.startswith(".")}
    agreed = "app.py docs explorer tests sample_models requirements.txt README.md CONTRIBUTING.md Makefile"
    beside = "pyproject.toml setup.py LICENSE CHANGELOG.md SKILL.md benchmarks mkdocs.yml"
    assert top <= {*agreed.split(), *beside.split()}


def test_tests_stand_where_their_module_stands() -> None:
    """One room a room: a folder of tests has the name of a folder of the code."""
    extra = {"tests/benchmarks", "tests/browser", "tests/golden", "tests/gpu", "tests/sample_models"}
    lost = []
    for folder in sorted({path.parent for path in (ROOT / "tests").rglob("test_*.py")} - {ROOT / "tests"}):
        mirrored = PACKAGE / folder.relative_to(ROOT / "tests")
        if name_of(folder) not in extra and not mirrored.is_dir():
            lost.append(name_of(folder))
    assert not lost


def needs_of(slice: str) -> set[str]:
    """Rooms of the core that the files of a slice import: `engine.state`, `record`."""
    needs = set()
    for module, path in modules().items():
        if module.startswith(f"explorer.{slice}."):
            for name in imported(path):
                parts = name.split(".")[1:3]
                if name.startswith("explorer.") and parts[0] not in SLICES:
                    needs.add(".".join(parts if PACKAGE.joinpath(*parts).is_dir() else parts[:1]))
    return needs


@pytest.mark.parametrize("slice", SLICES)
def test_a_slice_lists_what_it_needs_of_the_core(slice: str) -> None:
    _, _, listed = (ast.get_docstring(tree(PACKAGE / slice / "__init__.py")) or "").partition("Needs of the core: ")
    assert sorted(needs_of(slice)) == re.findall(r"[\w.]*\w", listed)
