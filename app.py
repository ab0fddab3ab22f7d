"""Checkpoint Explorer in the browser: `streamlit run app.py [-- --model REF ...]`. Page configuration and navigation."""

from explorer.ui.navigation import main

main()
