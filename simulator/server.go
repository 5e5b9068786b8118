// Package simulator serves a simulated Oxide rack: the API over HTTP, and an admin listener through
// which tests observe and disturb the rack.
//
// [Open] opens a rack and returns its [Server]. The server checks a request in this order: the API
// version, the route, the path, query and body, and the token. Then it carries out the operation.
// Server.withFaults applies the faults; the adminapi.Phase of a fault determines when.
// Server.respond applies the active mutation. Server.record writes the request log.
//
// Package engine has the operations and decides by the rack's rules. Package store has the records;
// everything that the rack has acknowledged is on disk. Package dataplane has the bytes of disks
// and the guest views. Package adminapi has the wire types of the admin listener, including faults.
// Package console has the admin listener's web page, which also shows the drivers' logs of their
// changes on nodes (flight records). Package flightlog reads them.
//
// Every rule of the rack in this code cites an assumption (A01, A02, …) of ASSUMPTIONS.md, which
// names its source. If the simulator lacks an operation of a rack, it answers 501 and logs an
// error, so no response is wrong by accident. An adminapi.Fault makes a response wrong on purpose.
//
// The instances see their disks as loop devices, which need Linux and root. A rack with
// Config.Devices [NoDevices] has no devices and runs on any system. Package simulatortest starts
// such a rack for the tests of other programs.
package simulator

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/broken"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/console"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/flightlog"
)

type (
	// Config configures the rack. The zero value is a rack in a new directory, with a project
	// "default" and without instances. Its fields (go doc ./simulator/engine.Config describes them):
	//
	//	Dir, Volatile                       its directory, and whether a power cut may undo changes
	//	Projects, Instances, Images, Disks  the objects that it has from the start
	//	Token, TokenExpires, Role           its users; default: any oxide-token-…, as a collaborator
	//	APIHosts, AdminHosts                further host names that clients may use
	//	Hotplug, DiskLimit, QuotaBytes      its limits; the zero values are full, 12 and 64 TiB
	//	DeviceDelay, CreateHold, SnapshotHold, InstanceDelay, FreeDelay, QuotaFirst  its delays
	//	Devices, FlakyDisks, NoDiscards, FirstLoop, KeepDevices, Seed  the devices of its guests
	//	Machines, MachineType               the image of its guests, if they are virtual machines
	//	Log                                 its logger
	Config = engine.Config
	// InstanceSpec is an instance that the rack has from the start: its Name, whether it is Stopped,
	// and optionally its ID and its Project.
	InstanceSpec = engine.InstanceSpec
	// ImageSpec is an image that the rack has from the start: its Name, its Project (or none for an
	// image of the silo), its BlockSize, and either a File or SizeBytes of zeroes.
	ImageSpec = engine.ImageSpec
	// DiskSpec is a disk that the rack has from the start: its Name, Project, SizeBytes and BlockSize,
	// and optionally the Image that it is a copy of and the Instance to which it is attached.
	DiskSpec = engine.DiskSpec
	// Devices selects whether guests see their disks as devices; "" requires devices.
	Devices = dataplane.Devices
	// Hotplug selects how the rack attaches disks to running instances: "full", "attach-only" or
	// "none", and after commas "record-first", "refusals-500" or "surprise-removal".
	Hotplug = adminapi.Hotplug
)

// The values of Config.Devices, besides "".
const (
	NoDevices         = dataplane.NoDevices
	DevicesIfPossible = dataplane.DevicesIfPossible
)

// Server serves a rack's API and its admin listener. Faults can be added and removed at any time.
type Server struct {
	Faults Faults
	// Flights follows the drivers' flight records that the console shows.
	Flights              flightlog.Log
	rack                 *engine.Simulation
	token                string
	apiHosts, adminHosts []string
	// bodyTime limits how long a client may take to send a body. large limits how many clients may
	// send bodies of more than smallBody bytes at the same time.
	bodyTime time.Duration
	large    chan struct{}
	log      *slog.Logger
	requests requestLog
	mutation broken.Switch
}

// Open opens a rack and returns its server.
func Open(ctx context.Context, c engine.Config) (*Server, error) {
	rack, err := engine.Open(ctx, c)
	if err != nil {
		return nil, err
	}
	return &Server{rack: rack, token: c.Token, apiHosts: c.APIHosts, adminHosts: c.AdminHosts,
		bodyTime: time.Minute, large: make(chan struct{}, 16), log: cmp.Or(c.Log, slog.Default())}, nil
}

// Close closes the rack: it ends all delays, waits for the operations in progress, and releases
// every device. Everything that the rack has acknowledged is in its directory.
func (s *Server) Close() error { return s.rack.Close() }

// Mutate ends the active mutation, and activates the one with this name; "" activates none.
func (s *Server) Mutate(name string) error { return s.mutation.Set(s.rack, name) }

// Requests returns the request log.
func (s *Server) Requests() []adminapi.Request { return s.requests.since(0) }

// Reset returns the rack to its start: it has only the objects and the switches of the Config, no
// fault or mutation is active, and the request log is empty. The guests lose their disks.
func (s *Server) Reset(ctx context.Context) error {
	s.Faults.Clear()
	if err := s.Mutate(""); err != nil {
		return err
	}
	err := s.rack.Reset(ctx)
	s.requests.clear()
	s.Flights.Clear()
	return err
}

// Instances returns the instances of the Config, with their IDs.
func (s *Server) Instances() []engine.InstanceSpec { return s.rack.InstanceSpecs() }

// GuestDir returns the directory of an instance's guest view, which contains sys and dev.
func (s *Server) GuestDir(instanceID string) string { return s.rack.Plane().GuestDir(instanceID) }

// Machines returns the running virtual machines.
func (s *Server) Machines() []adminapi.Machine { return s.rack.Machines() }

// SSHKey returns the path of the key for root's login to virtual machines, or "" without machines.
func (s *Server) SSHKey() string { return s.rack.Plane().VMs.SSHKey() }

// NoDevices returns the reason why no guest sees a disk, or nil if guests see their disks.
func (s *Server) NoDevices() error { return s.rack.Plane().NoDevices() }

// Dir returns the rack's directory.
func (s *Server) Dir() string { return s.rack.Dir() }

// RunDeferred ends all delays that come from the fault phase Deferred or the switch FreeDelay. It
// returns when the delayed work is done.
func (s *Server) RunDeferred(ctx context.Context) error { return s.rack.RunDeferred(ctx) }

// ServeHTTP serves the API. Close and Reset do not wait for requests that are still being read.
func (s *Server) ServeHTTP(w http.ResponseWriter, hr *http.Request) {
	r := newRequest(hr)
	if err := console.CheckPage(hr, s.apiHosts, "--api-host"); err != nil {
		s.write(w, r, r.response(0, nil, &engine.Error{Status: http.StatusForbidden,
			Code: "Forbidden", Message: err.Error()}))
		return
	}
	r.raw, r.rawErr = s.readBody(w, r)
	end, ok := s.rack.Begin()
	if !ok {
		http.Error(w, engine.ErrClosed.Error(), http.StatusServiceUnavailable)
		return
	}
	a := func() response {
		defer end()
		a := s.respond(r)
		s.record(r, a)
		return a
	}()
	s.write(w, r, a)
}

// handle carries out a request. It applies no faults.
func (s *Server) handle(r *apiRequest) (status int, body any, err error) {
	if err := s.check(r); err != nil {
		return 0, nil, err
	}
	return s.serve(r)
}

// check parses the request and then authenticates its caller, in the rack's order (A14).
func (s *Server) check(r *apiRequest) error {
	if err := r.parse(); err != nil {
		return err
	}
	return s.authenticate(r)
}

func (s *Server) serve(r *apiRequest) (status int, body any, err error) {
	if r.op.serve == nil {
		err := unimplemented(r.op)
		s.log.Error("an operation is not implemented", slog.String("error", err.Error()))
		return 0, nil, err
	}
	r.call.Named = maps.Clone(r.call.Named) // the operation may change the map
	return r.op.serve(s.rack, r)
}

// record adds the request to the logs. Callers call record before they send the response.
func (s *Server) record(r *apiRequest, a response) {
	r.entry.Time = r.started.UTC()
	r.entry.Status = a.status
	if r.call.Object.ID != "" {
		r.entry.Object, r.entry.ObjectID = r.call.Object.Name, r.call.Object.ID
	}
	r.entry.DurationMS = float64(time.Since(r.started).Microseconds()) / 1000
	if r.entry.Faults == nil {
		r.entry.Faults = []string{}
	}
	s.requests.add(r.entry)
	if r.err != nil { // the caller gets only "Internal Server Error"
		s.log.Error("a request failed", slog.String("operation", r.entry.Operation),
			slog.String("request_id", r.id), slog.String("error", r.err.Error()))
	}
	s.log.Debug("request", slog.String("operation", r.entry.Operation),
		slog.String("method", r.entry.Method), slog.String("path", r.entry.Path),
		slog.String("object", r.entry.Object), slog.Int("status", a.status),
		slog.Float64("duration_ms", r.entry.DurationMS), slog.String("request_id", r.id))
}

// respond carries out a request, even if the caller gives up meanwhile (A18). The active mutation
// can change the request and the response.
func (s *Server) respond(r *apiRequest) response {
	m := s.mutation.Active()
	if m == nil {
		return s.withFaults(r)
	}
	x := s.exchange(r)
	if m.Before != nil {
		m.Before(x)
	}
	if x.Answer == nil {
		x.Answer = x.Carry()
	}
	if m.After != nil {
		m.After(x)
	}
	a := response{status: x.Answer.Status, header: x.Answer.Header, body: x.Answer.Body}
	if len(a.body) > 0 {
		a.contentType = jsonType
	}
	return a
}

func (s *Server) exchange(r *apiRequest) *broken.Interception {
	x := &broken.Interception{Rack: s.rack, RequestID: r.id, Request: r.Request, Body: r.raw,
		Operation: r.entry.Operation, Path: r.path}
	x.Carry = func() *broken.Answer {
		r.raw, r.faults = x.Body, nil
		r.find()
		a := s.withFaults(r)
		if a.header == nil {
			a.header = http.Header{}
		}
		return &broken.Answer{Status: a.status, Header: a.header, Body: a.body}
	}
	return x
}

// keptBytes limits the size of the request log, and keptText the length of a text from a client.
const (
	keptBytes = 64 << 20
	keptText  = 1 << 10
)

func clip(text string) string { return strings.Clone(text[:min(len(text), keptText)]) }

func size(r *adminapi.Request) int {
	return int(unsafe.Sizeof(*r)) + len(r.Path) + len(r.Caller) + len(r.Object) + 64*len(r.Faults)
}

type requestLog struct {
	mu sync.Mutex
	// mu guards the fields below. bytes is the size of the entries, and seq the last Seq.
	entries []adminapi.Request
	bytes   int
	seq     int
}

// add adds an entry. If the log is full, it first drops the older half of the entries.
func (l *requestLog) add(entry adminapi.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq++
	entry.Seq = l.seq
	if l.bytes += size(&entry); l.bytes > keptBytes {
		l.entries = slices.Clone(l.entries[len(l.entries)/2:])
		l.bytes = size(&entry)
		for i := range l.entries {
			l.bytes += size(&l.entries[i])
		}
	}
	l.entries = append(l.entries, entry)
}

func (l *requestLog) since(seq int) []adminapi.Request {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, _ := slices.BinarySearchFunc(l.entries, seq+1, func(r adminapi.Request, seq int) int {
		return r.Seq - seq
	})
	return append([]adminapi.Request{}, l.entries[i:]...)
}

func (l *requestLog) newest(limit int, keep func(*adminapi.Request) bool) (
	found []adminapi.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest := time.Now().Add(-time.Hour)
	for i := len(l.entries) - 1; i >= 0 && len(found) < limit; i-- {
		if r := &l.entries[i]; r.Time.Before(oldest) {
			break
		} else if keep(r) {
			found = append(found, *r)
		}
	}
	return found
}

// clear removes all entries. Later entries continue the numbering.
func (l *requestLog) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries, l.bytes = nil, 0
}

// Certificate returns a server's certificate for these hosts, and the path of the certificate
// authority that clients must trust. It keeps both in dir. It creates new ones only if dir has no
// certificate that is valid for the hosts, so clients still trust a rack that was restarted.
func Certificate(dir string, hosts []string) (cert tls.Certificate, caFile string, err error) {
	dir = filepath.Join(dir, "tls")
	caFile = filepath.Join(dir, "ca.pem")
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	if cert, err = tls.LoadX509KeyPair(certFile, keyFile); err == nil && goodFor(cert.Leaf, hosts) {
		return cert, caFile, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return cert, "", fmt.Errorf("make a certificate: %w", err)
	}
	files, err := makeCertificate(hosts)
	if err != nil {
		return cert, "", fmt.Errorf("make a certificate: %w", err)
	}
	for i, path := range []string{caFile, keyFile, certFile} {
		if err := engine.WriteDurably(path+".tmp", files[i]); err != nil {
			return cert, "", err
		}
		if err := os.Rename(path+".tmp", path); err != nil {
			return cert, "", fmt.Errorf("make a certificate: %w", err)
		}
	}
	cert, err = tls.LoadX509KeyPair(certFile, keyFile)
	return cert, caFile, err
}

func goodFor(leaf *x509.Certificate, hosts []string) bool {
	for _, host := range hosts {
		if leaf.VerifyHostname(host) != nil {
			return false
		}
	}
	return time.Now().AddDate(0, 1, 0).Before(leaf.NotAfter)
}

// makeCertificate creates an authority, and a certificate that the authority signs. It returns PEM
// texts: the authority, the certificate's key and the certificate. It drops the authority's key.
func makeCertificate(hosts []string) (files [3]string, err error) {
	caKey, caErr := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	key, keyErr := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err := errors.Join(caErr, keyErr); err != nil {
		return files, err
	}
	ca := template("simulated rack's authority")
	ca.IsCA, ca.BasicConstraintsValid = true, true
	ca.KeyUsage = x509.KeyUsageCertSign
	leaf := template("simulated rack")
	leaf.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			leaf.IPAddresses = append(leaf.IPAddresses, ip)
		} else {
			leaf.DNSNames = append(leaf.DNSNames, host)
		}
	}
	caDER, caErr := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	leafDER, leafErr := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	keyDER, keyErr := x509.MarshalPKCS8PrivateKey(key)
	for i, block := range []pem.Block{
		{Type: "CERTIFICATE", Bytes: caDER},
		{Type: "PRIVATE KEY", Bytes: keyDER},
		{Type: "CERTIFICATE", Bytes: leafDER},
	} {
		files[i] = string(pem.EncodeToMemory(&block))
	}
	return files, errors.Join(caErr, leafErr, keyErr)
}

func template(name string) *x509.Certificate {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		panic(err) // the system has no random numbers
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{Organization: []string{"oxide-simulator"}, CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().AddDate(1, 0, 0),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
}
