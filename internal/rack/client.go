// Package rack is the driver's client for an Oxide rack. To the SDK's client it adds the driver's
// token, reads that validate their responses, lists that always end, and the conversion of errors.
//
// The package changes nothing on a rack. Its callers do, with the methods of the SDK's client.
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
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Client is a client for one project of a rack.
type Client struct {
	*oxide.Client
	Project string // name or UUID
	// A change must be sent within LookLimit after its Look; 0 means DefaultLookLimit.
	LookLimit time.Duration

	world world
}

// requestTimeLimit limits every request. The deadlines of calls are shorter.
const requestTimeLimit = 10 * time.Minute

// Options contains the rack's address, the driver's project, and how to connect.
type Options struct {
	Host      string
	Project   string // name or UUID
	CAFile    string // empty for the system's certificates
	UserAgent string
}

// New returns a client that sends its requests through t, and a function that closes its idle
// connections.
func New(o Options, t *Transport) (*Client, func(), error) {
	base, err := connections(o, t.Tokens.Log)
	if err != nil {
		return nil, nil, fmt.Errorf("OXIDE_CA_FILE (--ca-file): %w", err)
	}
	t.Base = base
	if _, err := t.Tokens.get(context.Background(), false); err != nil {
		return nil, nil, fmt.Errorf("OXIDE_TOKEN_FILE (--token-file): %w", err)
	}
	client, err := oxide.NewClient(
		oxide.WithHost(o.Host),
		oxide.WithToken("set by the transport"),
		oxide.WithUserAgent(o.UserAgent),
		oxide.WithHTTPClient(&http.Client{
			Timeout:   requestTimeLimit,
			Transport: t,
			// A rack sends no redirects. To follow one could disclose the token to another host.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}),
	)
	if err != nil {
		return nil, nil, errors.New("OXIDE_HOST (--host): the client does not accept it")
	}
	return &Client{Client: client, Project: o.Project}, base.CloseIdleConnections, nil
}

func connections(o Options, log *slog.Logger) (*http.Transport, error) {
	base := http.DefaultTransport.(*http.Transport).Clone()
	base.MaxIdleConnsPerHost = 32
	base.IdleConnTimeout = 30 * time.Second
	base.MaxResponseHeaderBytes = 64 << 10
	// All calls share one HTTP/2 connection. If another machine takes over the rack's address, the
	// connection gets no answers. The pings detect that; TCP needs a quarter of an hour to give up.
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
		// VerifyConnection verifies the server with the file's current certificates.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies
		VerifyConnection: func(c tls.ConnectionState) error {
			pool, err := roots.get(context.Background(), false)
			if err != nil {
				return err
			}
			// If the rack's address is an IP address, the connection has no server name.
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

// ParseHost returns the scheme and host of a rack's address. The default scheme is https.
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

// ID parses a UUID for the Oxide client, or returns false.
func ID(id string) (oxide.NameOrId, bool) {
	canonical, ok := volume.ParseID(id)
	return oxide.NameOrId(canonical), ok
}

// World contains the ids of the driver's project and silo. Another project or rack may get the same
// name, but never the same id.
type World struct{ Project, Silo string }

type world struct {
	mu sync.Mutex
	// guarded by mu; zero before the first successful read
	ids World
	// guarded by mu; set if the last read found other ids than the first
	moved error
}

// World returns the ids that the first successful read found. If a later read found others, World
// reads the ids again, and returns an error while they differ from the first. For a client without
// a project it returns the zero World, which matches every object.
func (c *Client) World(ctx context.Context) (World, error) {
	c.world.mu.Lock()
	ids, moved := c.world.ids, c.world.moved
	c.world.mu.Unlock()
	if moved == nil && (ids.Project != "" || c.Project == "") {
		return ids, nil
	}
	return c.LookAtWorld(ctx)
}

// LookAtWorld reads the ids from the rack, and returns an error if they differ from the first ones.
func (c *Client) LookAtWorld(ctx context.Context) (World, error) {
	now, err := c.readWorld(ctx)
	if err != nil {
		return World{}, err
	}
	c.world.mu.Lock()
	defer c.world.mu.Unlock()
	w := &c.world
	if w.ids.Project == "" {
		w.ids = now
	}
	if w.moved = nil; now != w.ids {
		w.moved = csierr.New(csierr.ProjectChanged, "OXIDE_PROJECT was the project %s of the silo %s "+
			"when the driver started, and is now %s of %s: the volumes are not there; set OXIDE_PROJECT "+
			"to the project's id and check OXIDE_HOST", w.ids.Project, w.ids.Silo, now.Project, now.Silo)
	}
	return w.ids, w.moved
}

func (c *Client) readWorld(ctx context.Context) (World, error) {
	project, err := c.ProjectView(ctx, oxide.ProjectViewParams{Project: oxide.NameOrId(c.Project)})
	switch {
	case NotFound(err):
		return World{}, csierr.Coded(codes.PermissionDenied, csierr.ProjectNotFound, "this token sees "+
			"no project with the name or id in OXIDE_PROJECT, so the state of its objects is unknown; "+
			"give the token's user a role on the project")
	case err != nil:
		return World{}, Error(ctx, "read project", err)
	case !volume.IsID(project.Id), project.Id != c.Project && string(project.Name) != c.Project:
		return World{}, InvalidResponse("read project", "asked for the project in OXIDE_PROJECT and got "+
			"%.80q (%.80q)", project.Name, project.Id)
	}
	user, err := c.CurrentUserView(ctx)
	switch {
	case err != nil:
		return World{}, Error(ctx, "read user", err)
	case !volume.IsID(user.SiloId):
		return World{}, InvalidResponse("read user", "the silo's id is %.80q", user.SiloId)
	}
	return World{project.Id, user.SiloId}, nil
}

// ProjectParam returns the project for a request: the id once it is known, because another project
// may get the name.
func (c *Client) ProjectParam() oxide.NameOrId {
	c.world.mu.Lock()
	defer c.world.mu.Unlock()
	if c.world.ids.Project != "" {
		return oxide.NameOrId(c.world.ids.Project)
	}
	return oxide.NameOrId(c.Project)
}

func (w World) has(kind, text, project string) error {
	if w.Project == "" || project == w.Project {
		return nil
	}
	return csierr.New(csierr.OtherProject, "the %s %s is in the project %.80q, and OXIDE_PROJECT is "+
		"%s; the driver leaves it alone", kind, text, project, w.Project)
}

// Gone returns nil if an object that was not found no longer exists. An object is also not found if
// the token, the project or the rack has changed. So Gone first checks that the ids in World are
// unchanged. Then it calls again(), which must read the object once more and not find it.
func (c *Client) Gone(ctx context.Context, again func() error) error {
	if _, err := c.LookAtWorld(ctx); err != nil {
		return err
	}
	err := again()
	switch {
	case csierr.IsNotFound(err):
		return nil
	case err == nil:
		return csierr.New(csierr.OperationPending, "the rack did not find an object, and then did; "+
			"repeat the call")
	}
	return err
}

// DiskGone calls Gone for a disk.
func (c *Client) DiskGone(ctx context.Context, id oxide.NameOrId) error {
	return c.Gone(ctx, func() error {
		_, err := c.Disk(ctx, id)
		return err
	})
}

// SnapshotGone calls Gone for a snapshot.
func (c *Client) SnapshotGone(ctx context.Context, id oxide.NameOrId) error {
	return c.Gone(ctx, func() error {
		_, err := c.Snapshot(ctx, id)
		return err
	})
}

// Error converts an error of the Oxide client to the error for the CO. The text "doing" names the
// call, such as "create disk". If a refusal depends on an object's state, RPCs do not call Error:
// they read the object and decide from its state.
func Error(ctx context.Context, doing string, err error) error {
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	var answer *oxide.HTTPError
	if !errors.As(err, &answer) {
		return transportError(ctx, doing, err)
	}
	if !own(answer) {
		return notTheRack(ctx, doing, answer)
	}
	why := AnswerText(answer)
	switch {
	case errors.Is(err, oxide.ErrHTTP401):
		return csierr.New(csierr.TokenRejected, "%s: the rack does not accept the token: %s; set a "+
			"valid one in OXIDE_TOKEN or the token file", doing, why)
	case errors.Is(err, oxide.ErrHTTP403):
		return csierr.New(csierr.RoleMissing, "%s: the token's user may not do "+
			"this: %s; give it the role limited-collaborator on the project", doing, why)
	case errors.Is(err, oxide.ErrObjectNotFound):
		return csierr.New(csierr.ObjectNotFound, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrHTTP507), errors.Is(err, oxide.ErrInsufficientCapacity):
		return csierr.New(csierr.RackFull, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrConflict):
		return csierr.New(csierr.Conflict, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrObjectAlreadyExists):
		return csierr.New(csierr.NameTaken, "%s: %s", doing, why)
	case errors.Is(err, oxide.ErrInvalidValue):
		return csierr.New(csierr.ValueRefused, "%s: %s", doing, why)
	case !Definite(err), answer.HTTPResponse.StatusCode == http.StatusTooManyRequests:
		return csierr.New(csierr.RackUnavailable, "%s: the rack cannot answer now: %s", doing, why)
	}
	return csierr.New(csierr.RackError, "%s: %s", doing, why)
}

// own reports whether the rack itself sent the error response: the body has an error code, and the
// same request id as the header. Any other response may be from a server between driver and rack,
// and does not show whether the request had an effect.
func own(answer *oxide.HTTPError) bool {
	r := answer.ErrorResponse
	return r != nil && r.ErrorCode != "" && r.RequestId != "" &&
		r.RequestId == answer.HTTPResponse.Header.Get("X-Request-Id")
}

func notTheRack(ctx context.Context, doing string, answer *oxide.HTTPError) error {
	code := answer.HTTPResponse.StatusCode
	switch {
	case answer.ErrorResponse == nil && answer.HTTPResponse.ContentLength > int64(len(answer.RawBody)):
		// The SDK's error contains the response's headers and a part of its body, so do not wrap it.
		return transportError(ctx, doing, fmt.Errorf("a response with HTTP %d was truncated", code))
	case code == http.StatusNotFound:
		return csierr.New(csierr.RackUnknown, "%s: the server at OXIDE_HOST does not know this call: "+
			"%s; check that it is the rack's address and that the rack runs release v20 or later", doing,
			AnswerText(answer))
	}
	return csierr.New(csierr.RackUnavailable, "%s: %s; the rack's error code and request id are not "+
		"in it: a server between driver and rack answers in its place, or changes X-Request-Id", doing,
		AnswerText(answer))
}

// transportError returns the error for a request without a complete response. The error is
// retryable, because the rack may have made the change.
func transportError(ctx context.Context, doing string, err error) error {
	switch {
	case errors.Is(ctx.Err(), context.Canceled) && !outOfTime(ctx):
		return csierr.New(csierr.Canceled, "%s: the caller stopped waiting", doing)
	case ctx.Err() != nil:
		return csierr.New(csierr.DeadlineExceeded, "%s: the rack did not answer in time; it continues "+
			"the request, and a repeated call finds the result", doing)
	}
	return csierr.New(csierr.RackUnavailable, "%s: incomplete response from the rack: %s",
		doing, transportText(err))
}

// outOfTime reports whether the deadline has passed or is very near, because gRPC sometimes cancels
// a call slightly before the deadline.
func outOfTime(ctx context.Context) bool {
	const little = 5 * time.Millisecond
	deadline, limited := ctx.Deadline()
	return limited && time.Until(deadline) < little
}

var address = regexp.MustCompile(`(dial|read|write|local error|remote error) tcp [^ ]+: |` +
	`lookup [^ ]+( on [^ ]+)?: `)

var otherNames = regexp.MustCompile(`x509: (certificate is (not )?valid for|` +
	`cannot validate certificate for) .*`)

// transportText shortens an error of net/http. It removes the URL, which the SDK puts before the
// error, and the rack's address, which the readers of the message may not be allowed to know.
func transportText(err error) string {
	text := err.Error()
	if _, after, ok := strings.Cut(text, `": `); ok {
		text = after
	}
	text = address.ReplaceAllString(text, "")
	text = otherNames.ReplaceAllString(text, "x509: certificate is for other names than the one in "+
		"OXIDE_HOST")
	if strings.Contains(text, "x509: certificate signed by unknown authority") {
		text += "; put the certificate of the rack's authority into OXIDE_CA_FILE"
	}
	return text
}

// AnswerText returns the rack's error message and request id. It omits any body that is not the
// rack's JSON, such as a proxy's page.
func AnswerText(answer *oxide.HTTPError) string {
	code := answer.HTTPResponse.StatusCode
	if answer.ErrorResponse == nil || answer.ErrorResponse.Message == "" {
		return fmt.Sprintf("HTTP %d without an error message of the rack", code)
	}
	text := strings.TrimRight(csierr.Plain(answer.ErrorResponse.Message), ". ")
	if id := answer.ErrorResponse.RequestId; id != "" {
		return fmt.Sprintf("%s (HTTP %d, request %s)", text, code, id)
	}
	return fmt.Sprintf("%s (HTTP %d)", text, code)
}

// InvalidResponse returns the error for a success response that contradicts the request.
func InvalidResponse(doing, format string, args ...any) error {
	return csierr.New(csierr.RackResponseInvalid, "%s: invalid response from the rack: "+
		"%s", doing, fmt.Sprintf(format, args...))
}

// Definite reports whether the error proves that the rack itself refused the change, and so did not
// make it. After an internal error of the rack, the change may have been made.
func Definite(err error) bool {
	var answer *oxide.HTTPError
	if !errors.As(err, &answer) || !own(answer) {
		return false
	}
	code := answer.HTTPResponse.StatusCode
	return http.StatusBadRequest <= code && code < http.StatusInternalServerError &&
		code != http.StatusRequestTimeout || code == http.StatusInsufficientStorage
}
