// A client of deepmesh in Go: streams an answer, cancels, keeps a deadline, and retries after the delay that a refusal
// names.
//
//	client HOST:PORT QUESTION [-deadline 60s] [-tokens 256] [-stop-after 0] [-attempts 5]
//
// It prints the answer to standard output, and how it ended to standard error.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	deepmesh "deepmesh/v1"
)

type options struct {
	deadline  time.Duration
	tokens    uint
	stopAfter uint
	attempts  int
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: client HOST:PORT QUESTION [-deadline 60s] [-tokens 256] [-stop-after 0] [-attempts 5]")
		os.Exit(2)
	}
	var given options
	flags := flag.NewFlagSet("client", flag.ExitOnError)
	flags.DurationVar(&given.deadline, "deadline", time.Minute, "for all attempts together")
	flags.UintVar(&given.tokens, "tokens", 256, "the most tokens of an answer")
	flags.UintVar(&given.stopAfter, "stop-after", 0, "cancel after so many tokens; 0 reads to the end")
	flags.IntVar(&given.attempts, "attempts", 5, "how often to ask")
	flags.Parse(os.Args[3:])
	// This is for clients inside a cluster. From outside, if the gateway has public_tls, use
	// credentials.NewClientTLSFromCert(nil, "").
	channel, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err == nil {
		defer channel.Close()
		err = ask(deepmesh.NewGatewayServiceClient(channel), os.Args[2], given)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", status.Code(err), status.Convert(err).Message())
		os.Exit(1)
	}
}

// ask sends the question, again and again while the mesh refuses it and names a delay: nothing has been generated then.
func ask(gateway deepmesh.GatewayServiceClient, question string, given options) error {
	ctx, cancel := context.WithTimeout(context.Background(), given.deadline)
	defer cancel()
	if key := os.Getenv("DEEPMESH_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	for attempt := 1; ; attempt++ {
		begun, err := stream(ctx, gateway, question, given)
		delay, retry := retryDelay(err)
		if err == nil || begun || !retry || attempt == given.attempts {
			return err
		}
		fmt.Fprintf(os.Stderr, "refused: again in %s\n", delay)
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}

// stream prints one answer. It reports whether the answer began.
func stream(ctx context.Context, gateway deepmesh.GatewayServiceClient, question string, given options) (bool, error) {
	// Returning early cancels the call, which makes the mesh stop its work and free its memory.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	call, err := gateway.Generate(ctx, &deepmesh.GenerateRequest{
		Prompt: &deepmesh.Prompt{Form: &deepmesh.Prompt_Chat{Chat: &deepmesh.Chat{
			Messages: []*deepmesh.ChatMessage{{Role: "user", Content: question}},
		}}},
		MaxTokens: uint32(given.tokens),
	})
	if err != nil {
		return false, err
	}
	var begun bool
	var tokens uint32
	for {
		response, err := call.Recv()
		if err == io.EOF {
			return begun, status.Error(codes.Internal, "the stream ended without an end of the answer")
		}
		if err != nil {
			return begun, err
		}
		begun = true
		if delta := response.GetDelta(); delta != nil {
			fmt.Print(delta.ReasoningText, delta.Text)
			tokens += delta.TokenCount
		}
		if finished := response.GetFinished(); finished != nil {
			fmt.Fprintf(os.Stderr, "\nfinished: %d tokens\n", finished.Usage.CompletionTokens)
			return begun, nil
		}
		if given.stopAfter > 0 && tokens >= uint32(given.stopAfter) {
			fmt.Fprintf(os.Stderr, "\ncancelled: %d tokens\n", tokens)
			return begun, nil
		}
	}
}

// retryDelay is the delay in the refusal's RetryInfo, if it has one.
func retryDelay(err error) (time.Duration, bool) {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			delay := info.GetRetryDelay()
			return time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos()), true
		}
	}
	return 0, false
}
