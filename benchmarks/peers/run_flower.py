"""A client of Flower, and with `hub` its server with FedAvg and no evaluation."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
from flwr.client import NumPyClient
from flwr.compat.client.app import start_client
from flwr.compat.server.app import start_server
from flwr.server import ServerConfig
from flwr.server.strategy import FedAvg

from benchmarks.peers.part import given, synced

PORT = 29630
TENSORS = 8


def hub(world: int) -> None:
    least = max(1, world - 1)
    strategy = FedAvg(fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=least,
                      min_evaluate_clients=0, min_available_clients=least)
    threading.Timer(1.0, lambda: print("listening", flush=True)).start()
    start_server(server_address=f"0.0.0.0:{PORT}", config=ServerConfig(num_rounds=10**6),
                 strategy=strategy)


class Client(NumPyClient):
    """Sends back what it is given; a round is complete when the next one arrives."""

    def __init__(self, numel: int, form: str, world: int):
        self.world = world
        kind = {"f32": np.float32, "f16": np.float16}[form]
        self.values = [np.zeros(numel // TENSORS, kind) for _ in range(TENSORS)]

    def get_parameters(self, config):
        return self.values

    def fit(self, parameters, config):
        synced(self.world)
        return [np.asarray(each, values.dtype) for each, values in
                zip(parameters, self.values, strict=True)], 1, {}


def main() -> None:
    part = given()
    client = Client(part.numel, part.form, part.world).to_client()
    while True:
        try:
            start_client(server_address=f"{part.hub}:{PORT}", client=client)
        except Exception as error:  # the server is not there yet
            print(error, file=sys.stderr, flush=True)
            time.sleep(0.5)


if __name__ == "__main__":
    if sys.argv[1] == "hub":
        hub(int(sys.argv[2]))
    else:
        main()
