"""A run as one file for somebody else: charts as SVG, a page without network."""
