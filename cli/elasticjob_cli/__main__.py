"""Entry point: `python -m elasticjob_cli` is the same as `elasticjob`."""

if __name__ == "__main__":
    try:
        from elasticjob_cli.entry import main
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    main()
