"""The panel of a card in the Memory view: bar, figures, the refused request, what is unknown, other settings.

`memory.py` draws what a step holds at each event; this panel appears only for steps that are predicted for a card.
"""

from __future__ import annotations

import streamlit as st

from explorer.record.card import CardMemory
from explorer.record.measurement import Measurement
from explorer.ui.shared.charts import picture
from explorer.ui.shared.elements import escape, small_text
from explorer.view.memory.card import card_chart, cards_of
from explorer.view.text import explore as glossary
from explorer.view.text.runs import notes_of_cards

DRAWN = "drawn policy"


def card_panel(baseline: Measurement, candidate: Measurement | None, drawn: CardMemory | None) -> None:
    """Draws the card of the runs, if they are predicted for one. `drawn`: the forecast of a policy that did not run."""
    runs = {"baseline": baseline} | ({"candidate": candidate} if candidate is not None else {})
    memories = cards_of(runs) | ({DRAWN: drawn} if drawn is not None else {})
    if not memories:
        return
    chart = card_chart(memories)
    picture(chart, key="card")
    st.dataframe(
        list(chart.rows()),
        key="card_figures",
        hide_index=True,
        width="stretch",
        column_config={name: st.column_config.TextColumn(help=meaning) for name, meaning in glossary.CARD.items()},
        alt="What the step of each run holds on the card",
    )
    with st.container(gap="xsmall"):
        for title, note in notes_of_cards(memories):
            text = f"**{title}:** {escape(note)}"
            small_text(f":red[{text}]" if title == "Refused" else text)
