package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

// rackCodes are what an error of the rack may become.
var rackCodes = []codes.Code{
	codes.Unauthenticated, codes.PermissionDenied, codes.NotFound, codes.Internal,
	codes.ResourceExhausted, codes.FailedPrecondition, codes.AlreadyExists, codes.OutOfRange,
	codes.Unavailable,
}

// FuzzRackAnswer holds that whatever answers in the rack's place, the CO gets a code it knows and a
// line that anybody may read; and that only the rack's own words make an object "not found" (OX-6)
// or "already there".
func FuzzRackAnswer(f *testing.F) {
	f.Fuzz(func(t *testing.T, code uint16, body []byte, missing uint8) {
		response := &http.Response{
			StatusCode: 300 + int(code)%300, Body: io.NopCloser(bytes.NewReader(body)),
			ContentLength: int64(len(body)) + int64(missing),
			Header:        http.Header{"Server": {"tweety/" + canary}},
			Request:       httptest.NewRequest(http.MethodPost, "https://"+canary+"/v1/disks", nil),
		}
		cause := oxide.NewHTTPError(response)
		err := statusError(t.Context(), "create disk", cause)
		csitest.Presentable(t, err, rackCodes...)
		if strings.Contains(err.Error(), canary) {
			t.Fatalf("it shows the rack's address or a header: %v", err)
		}
		var said struct {
			ErrorCode string `json:"error_code"`
		}
		_ = json.Unmarshal(body, &said)
		got := status.Code(err)
		if got == codes.NotFound && said.ErrorCode != "ObjectNotFound" ||
			got == codes.AlreadyExists && said.ErrorCode != "ObjectAlreadyExists" {
			t.Fatalf("HTTP %d with %q is %v", response.StatusCode, body, got)
		}
		if (unknown(cause) || errors.Is(cause, oxide.ErrObjectAlreadyExists)) && refused(cause) {
			t.Fatalf("HTTP %d with %q is unknown and refused at once", response.StatusCode, body)
		}
	})
}

// FuzzTransport holds that what net/http says of a failed call does not show where the rack is.
func FuzzTransport(f *testing.F) {
	f.Fuzz(func(t *testing.T, why string) {
		failure := `Get "https://` + canary + `/v1/disks?project=x": ` + why
		err := statusError(t.Context(), "list disks", errors.New(failure))
		csitest.Presentable(t, err, codes.Unavailable)
		if strings.Contains(err.Error(), canary) && !strings.Contains(why, canary) {
			t.Fatalf("%q becomes %v", failure, err)
		}
	})
}
