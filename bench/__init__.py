"""`aioengine bench`: workloads, measurements, reports. Uses the engine's public face only."""
