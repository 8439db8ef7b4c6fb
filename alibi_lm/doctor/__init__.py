"""`alibi-lm doctor`: whether the hosts of a run can do it, before they try.

`probe` and `collective` run on every host, `hosts` starts them there, `checks` compares what they
say, `examine` puts it together.
"""
