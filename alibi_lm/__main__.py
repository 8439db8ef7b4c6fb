"""`python -m alibi_lm` is `alibi-lm`."""

from alibi_lm.cli.main import main

if __name__ == "__main__":
    main(prog_name="alibi-lm")
