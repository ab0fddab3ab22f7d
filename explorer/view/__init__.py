"""Pictures: records come in; Plotly figures, DOT or SVG go out. Read drawing/figure.py first."""
