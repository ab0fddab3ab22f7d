"""The Streamlit pages and the block-graph component."""
