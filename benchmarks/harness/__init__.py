"""What all suites share: records, processes that may hang, turns at a device, clocks, races, single kernels."""
