"""Whose part is done: workers' reports merged, requests tracked until all ranks have spoken.

`KVOutputAggregator` merges what all workers say of one step, `TransferTracker` follows requests
until every rank has acknowledged them, `yield_req_data` reads what a step schedules. Outputs,
records and statistics are the serving engine's own, known here by their attributes only.
"""

from kvferry.outputs.aggregator import KVConnectorOutput, KVOutputAggregator
from kvferry.outputs.requests import yield_req_data
from kvferry.outputs.tracker import TransferTracker

__all__ = ["KVConnectorOutput", "KVOutputAggregator", "TransferTracker", "yield_req_data"]
