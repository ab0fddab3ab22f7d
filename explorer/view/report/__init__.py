"""A record comes in; one HTML file with SVG charts, which needs no network, goes out. Read report.py first."""
