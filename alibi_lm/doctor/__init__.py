"""`alibi-lm doctor`: whether the hosts of a run can train it.

`hosts` starts `probe` and `collective` on every host, `checks` compares their reports, and
`examine` runs all of it.
"""
