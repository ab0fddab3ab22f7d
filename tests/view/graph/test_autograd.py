"""torchviz's DOT text becomes readable on either page."""

from __future__ import annotations

import graphviz
import pytest

from explorer.record.graph import AutogradPicture
from explorer.view.graph.dot import caption, themed

DOT = """digraph {
\tgraph [size="12,12"]
\tnode [align=left fontname=monospace fontsize=10 height=0.2 ranksep=0.1 shape=box style=filled]
\t1 [label="out\\n (4)" fillcolor=darkolivegreen1]
\t2 [label=AddmmBackward0]
\t3 [label="weight\\n (4, 4)" fillcolor=lightblue]
\t4 [label="saved orange" fillcolor=orange]
\t1 -> 2
}
"""


@pytest.mark.parametrize("dark", [True, False])
def test_fills_and_lines_follow_the_page(dark: bool) -> None:
    picture = themed(DOT, dark=dark)
    for fill in ("darkolivegreen1", "lightblue"):
        assert fill not in picture
    assert 'bgcolor="transparent"' in picture
    assert picture.count('fillcolor="#') == 4
    assert 'label="saved orange"' in picture
    assert picture.count("1 -> 2") == 1


def test_light_and_dark_differ() -> None:
    assert themed(DOT, dark=True) != themed(DOT, dark=False)


def test_hostile_names_stay_inside_their_quotes() -> None:
    dot = graphviz.Digraph()
    dot.node("1", '"] ; evil [label="<img src=x onerror=alert(1)>', fillcolor="lightblue")
    before, after = dot.source, themed(dot.source, dark=True)
    assert after.count("evil") == before.count("evil")
    assert after.splitlines()[-2].split("fillcolor")[0] == before.splitlines()[-2].split("fillcolor")[0]


def test_caption() -> None:
    picture = AutogradPicture(dot=DOT, n_nodes=1, n_saved_tensors=2, saved_bytes=1024**2)
    assert caption(picture) == "1 node, 2 saved tensors, 1.0 MiB"
