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

// ReasonsVariable is the environment variable that names a file. The reasons of the errors
// that the driver answers are collected in that file.
const ReasonsVariable = "OXIDE_SANITY_REASONS"

// firstWord matches the reason at the beginning of an error message. Messages of gRPC itself
// have no reason.
var firstWord = regexp.MustCompile(`^([A-Z][A-Za-z0-9]+): `)

// ReasonOf returns the reason of an error that the driver answered, or "" if it has none.
func ReasonOf(err *status.Status) string {
	if match := firstWord.FindStringSubmatch(err.Message()); match != nil {
		return match[1]
	}
	return ""
}

// seen contains the reasons that this process has collected already.
var seen sync.Map

// noteReason writes the reason and the code of an error that the driver answered to the file.
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

// inCapitals returns a code as CSI and the page of reasons write it.
func inCapitals(code codes.Code) string {
	if code == codes.Canceled {
		return "CANCELED" // gRPC itself writes two Ls
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
