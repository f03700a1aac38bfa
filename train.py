"""Train or measure one configuration, or (-m) a sweep of them: `python train.py precision=bf16 ckpt=every2`."""

from lowvram.cli.start import main

if __name__ == "__main__":
    main()
