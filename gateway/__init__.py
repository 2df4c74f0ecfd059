"""The service that clients call: gRPC and OpenAI HTTP in front of the mesh."""
