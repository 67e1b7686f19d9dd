"""Files that other libraries read and write: checkpoints and ONNX programs."""
