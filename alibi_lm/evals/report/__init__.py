"""The HTML report, comparison and plots."""
