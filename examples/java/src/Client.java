import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.RetryInfo;
import deepmesh.v1.Chat;
import deepmesh.v1.ChatMessage;
import deepmesh.v1.GatewayServiceGrpc;
import deepmesh.v1.GenerateRequest;
import deepmesh.v1.GenerateResponse;
import deepmesh.v1.Prompt;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.MetadataUtils;
import java.time.Duration;
import java.time.Instant;
import java.util.Iterator;
import java.util.Optional;
import java.util.concurrent.TimeUnit;

/**
 * A client of deepmesh in Java: streams an answer, cancels, keeps a deadline, and retries after the delay that a
 * refusal names.
 *
 * <pre>Client HOST:PORT QUESTION [--deadline SECONDS] [--tokens N] [--stop-after N] [--attempts N]</pre>
 *
 * It prints the answer to standard output, and how it ended to standard error.
 */
public final class Client {
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
  private static final Metadata.Key<String> AUTHORIZATION =
      Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

  private final GatewayServiceGrpc.GatewayServiceBlockingStub gateway;
  private final int tokens;
  private final int stopAfter;
  private final int attempts;
  private boolean begun;

  private Client(GatewayServiceGrpc.GatewayServiceBlockingStub gateway, int tokens, int stopAfter, int attempts) {
    this.gateway = gateway;
    this.tokens = tokens;
    this.stopAfter = stopAfter;
    this.attempts = attempts;
  }

  public static void main(String[] arguments) throws InterruptedException {
    if (arguments.length < 2) {
      System.err.println("usage: Client HOST:PORT QUESTION [--deadline SECONDS] [--tokens N] [--stop-after N] [--attempts N]");
      System.exit(2);
    }
    // This is for clients inside a cluster. From outside, if the gateway has public_tls, leave out usePlaintext.
    ManagedChannel channel = NettyChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    GatewayServiceGrpc.GatewayServiceBlockingStub stub = GatewayServiceGrpc.newBlockingStub(channel);
    if (System.getenv("DEEPMESH_API_KEY") != null) {
      Metadata key = new Metadata();
      key.put(AUTHORIZATION, "Bearer " + System.getenv("DEEPMESH_API_KEY"));
      stub = stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(key));
    }
    int tokens = (int) number(arguments, "--tokens", 256);
    int stopAfter = (int) number(arguments, "--stop-after", 0);
    Client client = new Client(stub, tokens, stopAfter, (int) number(arguments, "--attempts", 5));
    int status = 0;
    try {
      client.ask(arguments[1], Duration.ofMillis((long) (1000 * number(arguments, "--deadline", 60))));
    } catch (StatusRuntimeException error) {
      System.err.println(error.getStatus().getCode() + ": " + error.getStatus().getDescription());
      status = 1;
    }
    channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    System.exit(status);
  }

  /** Asks, again and again while the mesh refuses and names a delay: nothing has been generated then. */
  private void ask(String question, Duration deadline) throws InterruptedException {
    Instant end = Instant.now().plus(deadline);
    for (int attempt = 1; ; attempt++) {
      try {
        stream(question, Duration.between(Instant.now(), end));
        return;
      } catch (StatusRuntimeException error) {
        Optional<Duration> delay = retryDelay(error);
        if (begun || delay.isEmpty() || attempt == attempts) {
          throw error;
        }
        if (Instant.now().plus(delay.get()).isAfter(end)) {
          throw Status.DEADLINE_EXCEEDED.withDescription("the deadline comes before the next attempt").asRuntimeException();
        }
        System.err.println("refused: again in " + delay.get().toMillis() + " ms");
        Thread.sleep(delay.get().toMillis());
      }
    }
  }

  /** Prints one answer. */
  private void stream(String question, Duration time) {
    ChatMessage message = ChatMessage.newBuilder().setRole("user").setContent(question).build();
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setPrompt(Prompt.newBuilder().setChat(Chat.newBuilder().addMessages(message)))
            .setMaxTokens(tokens)
            .build();
    // Returning early cancels the call, which makes the mesh stop its work and free its memory.
    Context.CancellableContext call = Context.current().withCancellation();
    Context before = call.attach();
    try {
      Iterator<GenerateResponse> responses =
          gateway.withDeadlineAfter(time.toMillis(), TimeUnit.MILLISECONDS).generate(request);
      int received = 0;
      while (responses.hasNext()) {
        GenerateResponse response = responses.next();
        begun = true;
        System.out.print(response.getDelta().getReasoningText() + response.getDelta().getText());
        System.out.flush();
        received += response.getDelta().getTokenCount();
        if (response.hasFinished()) {
          System.err.println("\nfinished: " + response.getFinished().getUsage().getCompletionTokens() + " tokens");
          return;
        }
        if (stopAfter > 0 && received >= stopAfter) {
          System.err.println("\ncancelled: " + received + " tokens");
          return;
        }
      }
      throw Status.INTERNAL.withDescription("the stream ended without an end of the answer").asRuntimeException();
    } finally {
      call.detach(before);
      call.cancel(null);
    }
  }

  /** The delay in the refusal's RetryInfo, if it has one. */
  private static Optional<Duration> retryDelay(StatusRuntimeException error) {
    byte[] details = error.getTrailers() == null ? null : error.getTrailers().get(DETAILS);
    try {
      if (details != null) {
        for (com.google.protobuf.Any detail : com.google.rpc.Status.parseFrom(details).getDetailsList()) {
          if (detail.is(RetryInfo.class)) {
            com.google.protobuf.Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
            return Optional.of(Duration.ofSeconds(delay.getSeconds(), delay.getNanos()));
          }
        }
      }
    } catch (InvalidProtocolBufferException malformed) {
      return Optional.empty();
    }
    return Optional.empty();
  }

  private static double number(String[] arguments, String name, double otherwise) {
    for (int i = 2; i + 1 < arguments.length; i++) {
      if (arguments[i].equals(name)) {
        return Double.parseDouble(arguments[i + 1]);
      }
    }
    return otherwise;
  }
}
