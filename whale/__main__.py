"""``python -m whale``, which is also how ``torchrun -m whale ...`` starts the command on every rank."""

from whale.cli import main

if __name__ == "__main__":
    main()
