"""Training on tables: features made with polars and duckdb, files of pyarrow, results in SQL."""

from pathlib import Path

import corpus_probe
import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import sqlalchemy as sa
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

corpus_probe.imported()

TABLES = sa.MetaData()
LOSSES = sa.Table(
    "losses", TABLES, sa.Column("step", sa.Integer, primary_key=True), sa.Column("loss", sa.Float)
)


def features(folder: Path) -> torch.Tensor:
    numbers = np.random.default_rng(2).normal(size=64)
    raw = pa.table({"group": [number % 4 for number in range(64)], "value": numbers})
    pq.write_table(raw, folder / "raw.parquet")
    sums = (
        pl.scan_parquet(folder / "raw.parquet")
        .with_columns(pl.col("value").rank().over("group").alias("rank"))
        .collect()
    )
    sums.write_parquet(folder / "ranked.parquet")
    with duckdb.connect(folder / "rows.duckdb") as database:
        path = str(folder / "ranked.parquet")
        database.execute(f"create table rows as select * from read_parquet('{path}')")
        means = database.sql('select "group", avg(value) as mean from rows group by all').pl()
    joined = pl.from_arrow(pyarrow.dataset.dataset(folder / "ranked.parquet").to_table())
    joined = joined.join(means, on="group").sort("group", "rank")
    return torch.tensor(joined.select("value", "rank", "mean").to_numpy(), dtype=torch.float32)


def keep(folder: Path, losses: list[float]) -> None:
    engine = sa.create_engine(f"sqlite:///{folder}/losses.db")
    TABLES.create_all(engine)
    with engine.begin() as connection:
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
        connection.execute(sa.insert(LOSSES), rows)
    with engine.connect() as connection:
        print("kept", connection.execute(sa.select(sa.func.count()).select_from(LOSSES)).scalar())
    engine.dispose()


def train(folder: Path) -> None:
    torch.manual_seed(9)
    rows = features(folder)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(rows[step * 16 : step * 16 + 16]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("losses", losses)
    keep(folder, losses)
    dist.barrier()
    dist.destroy_process_group()


def read_again(folder: Path) -> None:
    print("rows", len(features(folder)))
    keep(folder, [1.0])


if __name__ == "__main__":
    corpus_probe.run(train, again=read_again, killed=True)
