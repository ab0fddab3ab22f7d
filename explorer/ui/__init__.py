"""The Streamlit pages and the block-graph component: clicks come in, drawn pages go out. Read navigation.py first."""
