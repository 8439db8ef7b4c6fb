"""Speeds against what they are compared with, as ratios taken in one run on one machine."""
