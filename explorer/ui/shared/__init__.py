"""Parts that several pages have: charts, model, progress, failure."""
