package rack

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const postDisk = "POST /v1/disks"

// create requests a disk after a look.
func create(ctx context.Context, c *Client, look Look) (open bool, err error) {
	return c.Request(ctx, "create disk", look, func(ctx context.Context) error {
		_, err := c.DiskCreate(ctx, oxide.DiskCreateParams{Project: racktest.Project,
			Body: &oxide.DiskCreate{Name: oxide.Name(volume.DiskName("blue", "pvc-1")),
				DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendLocal{}}}})
		return err
	})
}

// Any server between driver and rack may answer with any status, before or after the effect.
func TestOX8OnlyTheRacksOwnRefusalIsDefinite(t *testing.T) {
	refusal := func(status int) exchange {
		return rackError(status, "InvalidRequest", "no").To(postDisk)
	}
	type answer struct {
		name string
		exchange
		open bool
	}
	answers := []answer{
		{"the rack's refusal", refusal(400), false}, {"the rack's conflict", refusal(409), false},
		{"no room", refusal(507), false}, {"an error inside the rack", refusal(500), true},
		{"the rack's time is up", refusal(408), true},
		{"a refusal without an error code", rackError(400, "", "no").To(postDisk), true},
		{"a refusal that ends early", exchange{Want: postDisk, Status: 400,
			Body: `{"request_id":"r-1","error_code":"Inv`}, true},
		{"a disk", exchange{Want: postDisk, Status: 201, Body: diskOf("creating")}, false},
		{"another server's disk", exchange{Want: postDisk, Status: 201, Proxy: true,
			Body: diskOf("creating")}, true},
		{"a lost answer", exchange{Want: postDisk, Cut: true}, true},
	}
	for status := 200; status < 600; status++ {
		for _, body := range []string{"<html>", "{}", "null", refusal(400).Body} {
			e := exchange{Want: postDisk, Status: status, Body: body, Proxy: true}
			if status%100 < 12 || status == 499 {
				answers = append(answers, answer{fmt.Sprint("a proxy's ", status, " ", body), e, true})
			}
		}
	}
	for _, test := range answers {
		t.Run(test.name, func(t *testing.T) {
			open, err := create(t.Context(), clientThat(t, test.exchange), Looking())
			switch {
			case open != test.open:
				t.Errorf("open is %t after %v", open, err)
			case open && !csierr.Retryable(err):
				t.Errorf("the CO does not come back after %v", err)
			case !open && err != nil && !Definite(err):
				t.Errorf("%v is not the rack's", err)
			}
		})
	}
}

func TestAChangeIsNotSentOnAnOldLook(t *testing.T) {
	c := clientThat(t) // which expects no request
	open, err := create(t.Context(), c, Looking()-Look(DefaultLookLimit))
	csitest.Want(t, err, codes.Aborted, csierr.LookTooOld)
	if open {
		t.Error("it is open")
	}
	// A connection that takes long is no way around it.
	slow := make(chan struct{})
	dialing := fixedToken()
	c = clientWith(t, Options{Host: "http://rack.invalid"}, dialing)
	dialing.Base = roundTripper(func(r *http.Request) (*http.Response, error) {
		defer close(slow)
		<-r.Context().Done()
		return nil, r.Context().Err()
	})
	c.LookLimit = 50 * time.Millisecond
	_, err = create(t.Context(), c, Looking())
	<-slow
	csitest.Want(t, err, codes.Aborted, csierr.LookTooOld)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestARefusalOfTheTokenIsRepeatedOnlyIfItIsTheRacks(t *testing.T) {
	for proxy, want := range map[bool]int32{false: 2, true: 1} {
		var requests atomic.Int32
		path := filepath.Join(t.TempDir(), "token")
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			writeToken(t, path, fmt.Sprint("token-", requests.Add(1)))
			if !proxy {
				w.Header().Set("X-Request-Id", "r-1")
			}
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = w.Write([]byte(rackError(401, "Unauthorized", "no").Body))
		}))
		t.Cleanup(server.Close)
		writeToken(t, path, "token-0")
		c := clientWith(t, Options{Host: server.URL}, &Transport{Tokens: tokenFile(path)})
		_, _ = create(t.Context(), c, Looking())
		if got := requests.Load(); got != want {
			t.Errorf("of a proxy %t: %d requests, want %d", proxy, got, want)
		}
	}
}

func TestAnErrorBodyIsReadUpToItsBound(t *testing.T) {
	var sent atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadGateway)
		for range 30 {
			n, err := w.Write([]byte(strings.Repeat("<", 1<<20)))
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
	}))
	_, err := create(t.Context(), clientFor(t, server.URL), Looking())
	server.Close()
	csitest.Want(t, err, codes.Unavailable, csierr.RackUnavailable)
	var answer *oxide.HTTPError
	if errors.As(err, &answer) || len(err.Error()) > 1<<10 || sent.Load() > 16<<20 {
		t.Errorf("%d bytes were read, and the error has %d", sent.Load(), len(err.Error()))
	}
}

func TestACAFileIsReadAgain(t *testing.T) { // D-63
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Request-Id", "r-1")
		_, _ = w.Write([]byte(diskOf("detached")))
	}))
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "ca.pem")
	writeToken(t, path, string(racktest.PEM(selfSigned(t))))
	c := clientWith(t, Options{Host: server.URL, CAFile: path}, fixedToken())
	csitest.Want(t, viewing(t.Context(), c), codes.Unavailable, csierr.RackUnavailable)
	writeToken(t, path, string(racktest.PEM(server.Certificate().Raw)))
	_, err := c.DiskView(t.Context(), oxide.DiskViewParams{Disk: racktest.Disk})
	must(t, err)
}

// selfSigned returns a certificate that no server has.
func selfSigned(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1),
		IsCA: true}, &x509.Certificate{SerialNumber: big.NewInt(1)}, &key.PublicKey, key)
	must(t, err)
	return der
}
