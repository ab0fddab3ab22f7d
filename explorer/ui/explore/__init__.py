"""The Explore page: a drawn policy comes in, its forecast and measured figures go out. Read page.py first."""
