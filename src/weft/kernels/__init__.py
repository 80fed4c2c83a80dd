"""Frozen contracts between the stages. No behaviour beyond derived properties; no torch, no device.

Candidate -> Problem (a stand-alone graph with formats) -> Schedule -> KernelSource | LibraryCall
          -> KernelBinary -> Measurement -> Plan
"""
