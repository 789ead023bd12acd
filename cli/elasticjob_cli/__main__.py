"""`python -m elasticjob_cli` is `elasticjob`."""

from elasticjob_cli.main import main

if __name__ == "__main__":
    main()
