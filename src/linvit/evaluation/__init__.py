"""Scores of a trained network on sets that reviewers ask for, as a page."""
