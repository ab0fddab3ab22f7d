"""Parts of several pages: draft, model, charts, progress, failure. Read draft.py first."""
