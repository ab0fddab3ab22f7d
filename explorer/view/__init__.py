"""Pictures: records in; Plotly figures, DOT or SVG out."""
