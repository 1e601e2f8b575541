"""The wire format: protobuf code made from the .proto files beside it. Imports protobuf alone."""
