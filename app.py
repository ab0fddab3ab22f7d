"""Checkpoint Explorer in the browser: `streamlit run app.py [-- --model REF ...]`."""

from explorer.ui.navigation import main

main()
