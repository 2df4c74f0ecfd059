"""KEDA's contract with external scalers: generated from the .proto file in this folder."""
