"""`alibi-lm plan`: what each rank of a run holds, computes and sends, without starting it."""
