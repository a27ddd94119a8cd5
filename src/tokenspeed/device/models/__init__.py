"""Models behind `device.step.ForwardStep`."""
