package harness

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ReasonsVariable names a file that collects the reasons of the errors that the driver gave.
const ReasonsVariable = "OXIDE_SANITY_REASONS"

// firstWord is the reason in the message of an error; what gRPC itself says has none.
var firstWord = regexp.MustCompile(`^([A-Z][A-Za-z0-9]+): `)

// ReasonOf is the reason of an error that the driver gave, or "".
func ReasonOf(err *status.Status) string {
	if match := firstWord.FindStringSubmatch(err.Message()); match != nil {
		return match[1]
	}
	return ""
}

// seen collects reasons, each once for a process.
var seen sync.Map

// noteReason keeps the reason of an error that the driver gave, with its code.
func noteReason(err *status.Status) error {
	path, reason := os.Getenv(ReasonsVariable), ReasonOf(err)
	if path == "" || reason == "" {
		return nil
	}
	line := reason + " " + inCapitals(err.Code())
	if _, known := seen.LoadOrStore(line, true); known {
		return nil
	}
	f, failed := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if failed != nil {
		return fmt.Errorf("keep a reason: %w", failed)
	}
	defer f.Close()
	if _, failed := fmt.Fprintln(f, line); failed != nil {
		return fmt.Errorf("keep a reason: %w", failed)
	}
	return nil
}

// inCapitals is a code as CSI and the page write it.
func inCapitals(code codes.Code) string {
	if code == codes.Canceled {
		return "CANCELED" // where gRPC itself writes two Ls
	}
	var name strings.Builder
	for i, r := range code.String() {
		if i > 0 && unicode.IsUpper(r) {
			name.WriteByte('_')
		}
		name.WriteRune(unicode.ToUpper(r))
	}
	return name.String()
}
