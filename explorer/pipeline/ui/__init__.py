"""The Pipeline page: cuts and a schedule come in, a split and its run go out. Read page.py first."""
