"""The calculator and planner as one page: served, or written as files that work without a server."""
