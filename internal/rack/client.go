// Package rack is the driver's client of an Oxide rack: the SDK's client with the driver's token,
// reads that validate their responses, listings that always end, and the conversion of the rack's
// errors to the driver's.
//
// Files: client.go (construction), token.go and transport.go (the token, and the path of every
// request), disk.go and snapshot.go (reads and their validation, instances with the snapshots),
// paging.go and page_token.go (listings, divided into CSI's pages), errors.go (Oxide error to
// csierr).
//
// It never changes anything on a rack by itself: the caller does so, through the SDK's methods that
// Client embeds.
package rack

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Client is the client of one project of a rack: the Oxide client, and reads that validate their
// responses.
type Client struct {
	*oxide.Client
	Project string // name or UUID
	// LookLimit is how long after a look a change may be sent; 0 means DefaultLookLimit.
	LookLimit time.Duration

	world world
}

// requestTimeLimit is a safety net: every call has a shorter deadline of its own.
const requestTimeLimit = 10 * time.Minute

// Options are the rack's address, the driver's project, and how to connect.
type Options struct {
	Host      string
	Project   string // name or UUID
	CAFile    string // empty for the system's certificates
	UserAgent string
}

// New returns a client that sends its requests through t, and a function that closes idle
// connections.
func New(o Options, t *Transport) (*Client, func(), error) {
	base, err := connections(o, t.Tokens.Log)
	if err != nil {
		return nil, nil, fmt.Errorf("OXIDE_CA_FILE (--ca-file): %w", err)
	}
	t.Base = base
	if _, err := t.Tokens.current(context.Background()); err != nil {
		return nil, nil, fmt.Errorf("OXIDE_TOKEN_FILE (--token-file): %w", err)
	}
	client, err := oxide.NewClient(
		oxide.WithHost(o.Host),
		oxide.WithToken("set by the transport"),
		oxide.WithUserAgent(o.UserAgent),
		oxide.WithHTTPClient(&http.Client{
			Timeout:   requestTimeLimit,
			Transport: t,
			// A rack does not redirect, and a request to another host would carry the token.
			CheckRedirect: func(*http.Request, []*http.Request) error {
				return http.ErrUseLastResponse
			},
		}),
	)
	if err != nil {
		return nil, nil, errors.New("OXIDE_HOST (--host): the client does not accept it")
	}
	return &Client{Client: client, Project: o.Project}, base.CloseIdleConnections, nil
}

// connections returns the transport to the rack.
func connections(o Options, log *slog.Logger) (*http.Transport, error) {
	base := http.DefaultTransport.(*http.Transport).Clone()
	base.MaxIdleConnsPerHost = 32
	base.IdleConnTimeout = 30 * time.Second
	base.MaxResponseHeaderBytes = 64 << 10
	// All calls share one HTTP/2 connection. When the rack's address moves, nobody answers on it any
	// more. Without pings every call would wait until TCP gives up, after a quarter of an hour.
	base.HTTP2 = &http.HTTP2Config{SendPingTimeout: 10 * time.Second, PingTimeout: 5 * time.Second}
	if o.CAFile == "" {
		return base, nil
	}
	host, err := url.Parse(o.Host)
	if err != nil {
		return nil, csierr.WithoutPath(err)
	}
	roots := &renewedFile[*x509.CertPool]{path: o.CAFile, limit: fileLimit, log: log,
		parse: certificates}
	if _, err := roots.get(context.Background(), false); err != nil {
		return nil, err
	}
	base.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12,
		// VerifyConnection verifies, with the certificates that are in the file by now.
		InsecureSkipVerify: true, //nolint:gosec // see above
		VerifyConnection: func(c tls.ConnectionState) error {
			pool, err := roots.get(context.Background(), false)
			if err != nil {
				return err
			}
			// TLS sends no server name if it is an address.
			how := x509.VerifyOptions{DNSName: cmp.Or(c.ServerName, host.Hostname()), Roots: pool,
				Intermediates: x509.NewCertPool()}
			for _, certificate := range c.PeerCertificates[1:] {
				how.Intermediates.AddCert(certificate)
			}
			_, err = c.PeerCertificates[0].Verify(how)
			return err
		}}
	return base, nil
}

func certificates(pem []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, errors.New("holds no PEM certificate")
	}
	return pool, nil
}

// ParseHost parses a rack's address into scheme and host; without a scheme it is https.
func ParseHost(address string) (string, error) {
	if !strings.Contains(address, "://") {
		address = "https://" + address
	}
	u, err := url.Parse(address)
	switch {
	case err != nil, u.Scheme != "https" && u.Scheme != "http", u.Hostname() == "",
		u.User != nil, u.RawQuery != "", u.Fragment != "", strings.Trim(u.Path, "/") != "":
		return "", errors.New("has to be an address such as https://silo.sys.example.com")
	}
	return u.Scheme + "://" + u.Host, nil
}

// ID parses an id for the Oxide client.
func ID(id string) (oxide.NameOrId, bool) {
	canonical, ok := volume.ParseID(id)
	return oxide.NameOrId(canonical), ok
}
