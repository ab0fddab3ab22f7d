"""Checkpoint Explorer in the browser: `streamlit run app.py [-- --model REF ... --weights FILE ... --predict]`."""

from explorer.ui.navigation import main

main()
